/* surroundings CASE: transfers between two queue pairs of this process, and before that does to itself what programs do:
 *   plain         nothing
 *   small-stack   posts and polls from a thread with the smallest stack there is
 *   close-all     closes every descriptor but the first three
 *   daemon        becomes a daemon: a new session, no descriptor of before
 *   exec          starts itself again, by fork and by vfork, while the device is open: no descriptor is inherited */
#define _GNU_SOURCE
#include "verbs_pair.h"
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sys/wait.h>

#define LENGTH 50000
static unsigned char from[LENGTH], to[LENGTH];
static struct ibv_mr *from_mr, *to_mr;

static void *transfers(void *pair)
{
    for (int i = 0; i < 20; i++)
        transfer(pair, from, from_mr, to, to_mr, LENGTH, (unsigned char)i);
    return NULL;
}

static void open_pair(struct side pair[2])
{
    make_pair(pair);
    from_mr = reg(&pair[0], from, LENGTH);
    to_mr = reg(&pair[1], to, LENGTH);
}

static void close_pair(struct side pair[2])
{
    ibv_dereg_mr(from_mr);
    ibv_dereg_mr(to_mr);
    destroy_pair(pair);
}

static void plain(void)
{
    struct side pair[2];
    open_pair(pair);
    transfers(pair);
    close_pair(pair);
}

static void small_stack(void)
{
    struct side pair[2];
    pthread_attr_t attr;
    pthread_t thread;
    open_pair(pair);
    pthread_attr_init(&attr);
    CHECK(!pthread_attr_setstacksize(&attr, PTHREAD_STACK_MIN), "setstacksize");
    CHECK(!pthread_create(&thread, &attr, transfers, pair), "pthread_create");
    pthread_join(thread, NULL);
    close_pair(pair);
}

static void await(pid_t pid)
{
    int status;
    CHECK(pid > 0, "fork: %s", strerror(errno));
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "the child ended with wait status %#x", status);
}

static void daemonize(void)
{
    pid_t pid = fork();
    if (pid) {
        await(pid);
        return;
    }
    setsid();
    pid = fork();
    if (pid) {
        await(pid);
        _exit(0);
    }
    close_range(0, ~0U, 0);
    CHECK(open("/dev/null", O_RDWR) == 0 && dup(0) == 1 && dup(0) == 2, "/dev/null");
    plain();
    _exit(0);
}

static void exec_again(void)
{
    struct side pair[2];
    close_range(3, ~0U, 0); /* what the caller has left open */
    open_pair(pair);
    pid_t pid = fork();
    if (pid == 0) {
        execl("/proc/self/exe", "surroundings", "inherited", NULL);
        _exit(9);
    }
    await(pid);
    pid = vfork();
    if (pid == 0) {
        execl("/proc/self/exe", "surroundings", "inherited", NULL);
        _exit(9);
    }
    await(pid);
    transfers(pair);
    close_pair(pair);
}

/* What `exec` starts: nothing of the device is open here, and opening it works. */
static void inherited(void)
{
    char path[64], target[256];
    for (int fd = 3; fd < 1024; fd++) {
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        ssize_t n = readlink(path, target, sizeof(target) - 1);
        CHECK(n < 0, "descriptor %d was inherited: %.*s", fd, (int)n, target);
    }
    plain();
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "plain";
    if (!strcmp(how, "plain"))
        plain();
    else if (!strcmp(how, "small-stack"))
        small_stack();
    else if (!strcmp(how, "close-all"))
        close_range(3, ~0U, 0), plain();
    else if (!strcmp(how, "daemon"))
        daemonize();
    else if (!strcmp(how, "exec"))
        exec_again();
    else if (!strcmp(how, "inherited"))
        inherited();
    else
        die("no case %s", how);
    puts("ok");
    return 0;
}
