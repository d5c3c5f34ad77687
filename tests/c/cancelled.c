/* cancelled: threads that poll or post are cancelled again and again; the device must stay usable, and polling an empty
 * queue must leave errno alone. */
#define _GNU_SOURCE
#include "verbs_pair.h"
#include <pthread.h>

static unsigned char from[4096], to[4096];
static struct ibv_mr *from_mr, *to_mr;

static void *polls(void *argument)
{
    struct side *pair = argument;
    struct ibv_wc wc;
    for (;;) {
        ibv_poll_cq(pair[0].cq, 1, &wc);
        pthread_testcancel();
    }
    return NULL;
}

static void *posts(void *argument)
{
    struct side *pair = argument;
    struct ibv_wc wc;
    for (;;) {
        receive_into(&pair[1], to, sizeof to, to_mr);
        send_from(&pair[0], from, sizeof from, from_mr);
        ibv_poll_cq(pair[1].cq, 1, &wc);
        ibv_poll_cq(pair[0].cq, 1, &wc);
        pthread_testcancel();
    }
    return NULL;
}

int main(void)
{
    struct side pair[2], fresh[2];
    make_pair(pair);
    from_mr = reg(&pair[0], from, sizeof from);
    to_mr = reg(&pair[0], to, sizeof to);
    struct ibv_wc wc;
    errno = ERANGE;
    CHECK(ibv_poll_cq(pair[0].cq, 1, &wc) == 0, "a completion out of nothing");
    CHECK(errno == ERANGE, "polling an empty queue set errno to %d", errno);
    for (int i = 0; i < 100; i++) {
        pthread_t thread;
        void *result;
        CHECK(!pthread_create(&thread, NULL, i % 2 ? polls : posts, pair), "pthread_create");
        nanosleep(&(struct timespec){.tv_nsec = 10000 * i}, NULL); /* anywhere in its loop */
        pthread_cancel(thread);
        CHECK(!pthread_join(thread, &result) && result == PTHREAD_CANCELED, "it was not cancelled");
    }
    fresh[0] = make_side(pair[0].context, pair[0].pd);
    fresh[1] = make_side(pair[0].context, pair[0].pd);
    connect_side(&fresh[0], &fresh[1].address);
    connect_side(&fresh[1], &fresh[0].address);
    transfer(fresh, from, from_mr, to, to_mr, sizeof from, 3);
    puts("ok");
    return 0;
}
