/* unmapped CASE: the program takes registered memory away, and a transfer must end in an error completion:
 * send, send-tail, send-none (PROT_NONE), send-truncated (a file cut under its mapping), receive, receive-readonly,
 * receive-truncated. Its own fault handler must still see its own faults afterwards. */
#define _GNU_SOURCE
#include "verbs_pair.h"
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#define LENGTH 65536
static sigjmp_buf back;
static void on_fault(int number)
{
    (void)number;
    siglongjmp(back, 1);
}

static void *map(int file)
{
    void *p = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, file, 0);
    CHECK(p != MAP_FAILED, "mmap: %s", strerror(errno));
    memset(p, 1, LENGTH);
    return p;
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "send";
    int sending = !strncmp(name, "send", 4), file = -1;
    const char *how = strchr(name, '-') ? strchr(name, '-') + 1 : "";
    if (!strcmp(how, "truncated")) {
        file = memfd_create("unmapped", 0);
        CHECK(file >= 0 && !ftruncate(file, LENGTH), "memfd: %s", strerror(errno));
    }
    struct sigaction action = {.sa_handler = on_fault, .sa_flags = SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);

    struct side pair[2];
    make_pair(pair);
    unsigned char *lost = map(file), *kept = map(-1);
    struct ibv_mr *lost_mr = reg(&pair[0], lost, LENGTH), *kept_mr = reg(&pair[0], kept, LENGTH);
    transfer(pair, sending ? lost : kept, sending ? lost_mr : kept_mr, sending ? kept : lost,
        sending ? kept_mr : lost_mr, LENGTH, 1);

    if (!strcmp(how, "tail"))
        CHECK(!munmap(lost + LENGTH - 4096, 4096), "munmap");
    else if (!strcmp(how, "none"))
        CHECK(!mprotect(lost, LENGTH, PROT_NONE), "mprotect");
    else if (!strcmp(how, "readonly"))
        CHECK(!mprotect(lost, LENGTH, PROT_READ), "mprotect");
    else if (!strcmp(how, "truncated"))
        CHECK(!ftruncate(file, 4096), "ftruncate");
    else
        CHECK(!munmap(lost, LENGTH), "munmap");

    CHECK(!receive_into(&pair[1], sending ? kept : lost, LENGTH, sending ? kept_mr : lost_mr), "post_recv");
    int rc = send_from(&pair[0], sending ? lost : kept, LENGTH, sending ? lost_mr : kept_mr);
    CHECK(!rc, "post_send: %s", strerror(rc));
    enum ibv_wc_status sent = next_status(&pair[0]);
    CHECK(sent == (sending ? IBV_WC_LOC_PROT_ERR : IBV_WC_REM_OP_ERR), "the send ended in: %s", ibv_wc_status_str(sent));
    if (!sending) {
        enum ibv_wc_status received = next_status(&pair[1]);
        CHECK(received == IBV_WC_LOC_PROT_ERR, "the receive ended in: %s", ibv_wc_status_str(received));
    }

    if (sigsetjmp(back, 1) == 0) {
        *(volatile int *)16 = 1;
        die("a fault of the program's own went unseen");
    }
    ibv_dereg_mr(lost_mr);
    ibv_dereg_mr(kept_mr);
    destroy_pair(pair);
    puts("ok");
    return 0;
}
