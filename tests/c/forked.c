/* forked: the process forks with a connected queue pair, idle and again while a thread transfers. In the child every
 * verb must fail or do nothing, without a crash, and exit() must work; in the parent the transfers go on. */
#include "verbs_pair.h"
#include <pthread.h>
#include <sys/wait.h>

#define LENGTH 8192
static struct side pair[2];
static unsigned char *from, *to;
static struct ibv_mr *from_mr, *to_mr;
static volatile int stop;

static void *transfers(void *unused)
{
    for (unsigned char i = 0; !stop; i++)
        transfer(pair, from, from_mr, to, to_mr, LENGTH, i);
    return unused;
}

static void child(void)
{
    struct ibv_wc wc;
    struct ibv_port_attr port;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    alarm(20); /* a verb that hangs is a failure too */
    CHECK(send_from(&pair[0], from, LENGTH, from_mr) != 0, "post_send in the child succeeded");
    CHECK(receive_into(&pair[1], to, LENGTH, to_mr) != 0, "post_recv in the child succeeded");
    (void)ibv_poll_cq(pair[0].cq, 1, &wc); /* a completion that was in memory already may be seen */
    CHECK(!ibv_reg_mr(pair[0].pd, from, LENGTH, 0), "reg_mr in the child succeeded");
    CHECK(!ibv_create_cq(pair[0].context, 4, NULL, NULL, 0), "create_cq in the child succeeded");
    CHECK(ibv_modify_qp(pair[0].qp, &attr, IBV_QP_STATE) != 0, "modify_qp in the child succeeded");
    (void)ibv_query_port(pair[0].context, 1, &port);
    (void)ibv_req_notify_cq(pair[0].cq, 0);
    (void)ibv_dereg_mr(to_mr);
    (void)ibv_destroy_qp(pair[0].qp);
    (void)ibv_close_device(pair[0].context);
    exit(0);
}

static void fork_once(const char *when)
{
    int status;
    pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0)
        child();
    CHECK(waitpid(pid, &status, 0) == pid, "waitpid: %s", strerror(errno));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child, forked %s, ended with wait status %#x", when, status);
}

int main(void)
{
    pthread_t thread;
    make_pair(pair);
    from = aligned_alloc(4096, LENGTH);
    to = aligned_alloc(4096, LENGTH);
    from_mr = reg(&pair[0], from, LENGTH);
    to_mr = reg(&pair[1], to, LENGTH);
    transfer(pair, from, from_mr, to, to_mr, LENGTH, 1);
    fork_once("idle");
    for (int i = 0; i < 100; i++)
        transfer(pair, from, from_mr, to, to_mr, LENGTH, i);

    CHECK(!pthread_create(&thread, NULL, transfers, NULL), "pthread_create");
    for (int i = 0; i < 20; i++)
        fork_once("busy");
    CHECK(system("true") == 0, "system()");
    stop = 1;
    pthread_join(thread, NULL);
    transfer(pair, from, from_mr, to, to_mr, LENGTH, 3);
    ibv_dereg_mr(from_mr);
    ibv_dereg_mr(to_mr);
    destroy_pair(pair);
    puts("ok");
    return 0;
}
