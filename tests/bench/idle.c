/* A connected pair that waits for completions: CPU time and context switches of the whole process, after it settled.
 * Prints "CPU-MICROSECONDS SWITCHES MILLISECONDS". */
#include "../c/verbs_pair.h"
#include <poll.h>
#include <sys/resource.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static long microseconds(const struct rusage *usage)
{
    return (usage->ru_utime.tv_sec + usage->ru_stime.tv_sec) * 1000000L + usage->ru_utime.tv_usec + usage->ru_stime.tv_usec;
}

int main(void)
{
    struct side pair[2];
    struct rusage before, after;
    static char buffer[8192];
    make_pair(pair);
    struct ibv_mr *mr = reg(&pair[0], buffer, sizeof(buffer));
    CHECK(!receive_into(&pair[1], buffer, sizeof(buffer), mr), "post_recv: %s", strerror(errno));
    CHECK(!send_from(&pair[0], buffer, 64, mr), "post_send: %s", strerror(errno));
    CHECK(next_status(&pair[0]) == IBV_WC_SUCCESS, "the send failed");
    CHECK(next_status(&pair[1]) == IBV_WC_SUCCESS, "the receive failed");

    /* Now both wait, as a server does, for something that does not come. */
    struct ibv_comp_channel *channel = ibv_create_comp_channel(pair[0].context);
    CHECK(channel, "create_comp_channel: %s", strerror(errno));
    struct ibv_cq *cq = ibv_create_cq(pair[0].context, 16, NULL, channel, 0);
    CHECK(cq && !ibv_req_notify_cq(cq, 0), "an armed CQ: %s", strerror(errno));
    CHECK(!receive_into(&pair[1], buffer, sizeof(buffer), mr), "post_recv: %s", strerror(errno));
    struct pollfd descriptor = {.fd = channel->fd, .events = POLLIN};
    CHECK(!poll(&descriptor, 1, 1000), "an event that nobody caused");
    double start = now();
    getrusage(RUSAGE_SELF, &before);
    CHECK(!poll(&descriptor, 1, 3000), "an event that nobody caused");
    getrusage(RUSAGE_SELF, &after);
    printf("%ld %ld %.0f\n", microseconds(&after) - microseconds(&before),
        after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw, (now() - start) * 1000);
    CHECK(!ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel), "destroy_cq: %s", strerror(errno));
    CHECK(!ibv_dereg_mr(mr), "dereg_mr: %s", strerror(errno));
    destroy_pair(pair);
    return 0;
}
