/* dying_peer HOW: a process streams messages to another, which ends in the middle of it: exit, _exit, abort, kill.
 * The sender must see its messages up to there, then one that failed for want of answers, then flushed ones. */
#include "verbs_pair.h"
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define LENGTH 32768
#define MESSAGES 50 /* that the receiver takes before it ends */

static struct side open_side(int peer)
{
    struct ibv_context *context = open_device();
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct address address;
    CHECK(pd, "alloc_pd: %s", strerror(errno));
    struct side side = make_side(context, pd);
    CHECK(write(peer, &side.address, sizeof(address)) == sizeof(address), "write");
    CHECK(read(peer, &address, sizeof(address)) == sizeof(address), "the other process is gone");
    connect_side(&side, &address);
    return side;
}

static void receiver(int peer, const char *how)
{
    char *buffer = malloc(LENGTH);
    struct side side = open_side(peer);
    struct ibv_mr *mr = reg(&side, buffer, LENGTH);
    for (int i = 0; i < 32; i++)
        CHECK(!receive_into(&side, buffer, LENGTH, mr), "post_recv");
    CHECK(write(peer, "r", 1) == 1, "write");
    for (int i = 0; i < MESSAGES; i++) {
        enum ibv_wc_status status = next_status(&side);
        CHECK(status == IBV_WC_SUCCESS, "receive %d: %s", i, ibv_wc_status_str(status));
        CHECK(!receive_into(&side, buffer, LENGTH, mr), "post_recv");
    }
    if (!strcmp(how, "exit"))
        exit(0);
    if (!strcmp(how, "_exit"))
        _exit(0);
    if (!strcmp(how, "abort"))
        abort();
    kill(getpid(), SIGKILL);
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "kill";
    int ends[2], good = 0, bad = 0, posted = 0, status;
    char ready;
    struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends), "socketpair");
    pid_t child = fork(); /* before any device is open */
    if (child == 0) {
        close(ends[0]);
        receiver(ends[1], how);
    }
    close(ends[1]);
    char *buffer = calloc(1, LENGTH);
    struct side side = open_side(ends[0]);
    struct ibv_mr *mr = reg(&side, buffer, LENGTH);
    CHECK(read(ends[0], &ready, 1) == 1, "the receiver did not start");
    while (posted < DEPTH / 2) {
        CHECK(!send_from(&side, buffer, LENGTH, mr), "post_send");
        posted++;
    }
    while (good + bad < posted) {
        enum ibv_wc_status wanted = bad ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR, got = next_status(&side);
        if (got == IBV_WC_SUCCESS && !bad) {
            good++;
            CHECK(!send_from(&side, buffer, LENGTH, mr), "post_send");
            posted++;
        } else {
            CHECK(got == wanted, "send %d ended in: %s, not %s", good + bad, ibv_wc_status_str(got), ibv_wc_status_str(wanted));
            bad++;
        }
    }
    CHECK(good >= MESSAGES - 1, "only %d messages succeeded", good);
    CHECK(waitpid(child, &status, 0) == child, "waitpid");
    CHECK(how[0] == 'k' ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL :
          how[0] == 'a' ? WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT : status == 0,
        "the receiver ended with wait status %#x", status);
    printf("ok: %d messages, then %d failed\n", good, bad);
    return 0; /* all left open: exit must cope */
}
