// roundtrip -d DEVICE -g GID-INDEX -p PORT [-n ROUNDS] [SERVER]: 64-byte SENDs over RC, there and back. The next one is
// posted when the answer is there; nobody waits for completions of sends (ibv_rc_pingpong and ib_send_lat do, and so
// measure the way of the acknowledgement, too). The client prints the median and mean of a round trip in microseconds.
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SIZE = 64, RECEIVES = 64, SENDS = 128, SIGNAL_EVERY = 32 };

struct end {
    uint32_t qpn, psn;
    union ibv_gid gid;
};

static void check(int ok, const char *what)
{
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static int connected(const char *server, const char *port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = server ? 0 : AI_PASSIVE, .ai_family = AF_INET}, *at;
    check(getaddrinfo(server, port, &hints, &at) == 0, "getaddrinfo");
    int fd = socket(at->ai_family, SOCK_STREAM, 0), one = 1;
    check(fd >= 0, "socket");
    if (server) {
        check(connect(fd, at->ai_addr, at->ai_addrlen) == 0, "connect");
        return fd;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    check(bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, 1) == 0, "listen");
    int peer = accept(fd, NULL, NULL);
    check(peer >= 0, "accept");
    return peer;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Posts a send; every so often one tells when it is done, or the queue would never be empty.
static void post(struct ibv_qp *qp, struct ibv_sge *from, int number)
{
    struct ibv_send_wr send = {.sg_list = from, .num_sge = 1, .opcode = IBV_WR_SEND,
        .send_flags = number % SIGNAL_EVERY ? 0 : IBV_SEND_SIGNALED}, *bad;
    check(!ibv_post_send(qp, &send, &bad), "ibv_post_send");
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

int main(int argc, char **argv)
{
    const char *device = NULL, *port = "18515";
    int gid_index = 0, rounds = 20000, option;
    while ((option = getopt(argc, argv, "d:g:p:n:")) != -1) {
        switch (option) {
        case 'd': device = optarg; break;
        case 'g': gid_index = atoi(optarg); break;
        case 'p': port = optarg; break;
        case 'n': rounds = atoi(optarg); break;
        default: return 2;
        }
    }
    const char *server = optind < argc ? argv[optind] : NULL;
    int count;
    struct ibv_device **list = ibv_get_device_list(&count), *found = NULL;
    for (int i = 0; i < count; i++)
        if (!device || !strcmp(ibv_get_device_name(list[i]), device))
            found = list[i];
    check(found != NULL, "no such device");
    struct ibv_context *context = ibv_open_device(found);
    check(context != NULL, "ibv_open_device");
    struct ibv_pd *pd = ibv_alloc_pd(context);
    static char memory[2 * SIZE];
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_cq *cq = ibv_create_cq(context, SENDS + RECEIVES, NULL, NULL, 0);
    check(pd && mr && cq, "resources");
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = SENDS, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    check(qp != NULL, "ibv_create_qp");
    struct end own = {.qpn = qp->qp_num, .psn = (uint32_t)getpid() & 0xffffff}, peer;
    check(ibv_query_gid(context, 1, gid_index, &own.gid) == 0, "ibv_query_gid");

    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
    struct ibv_sge into = {(uintptr_t)memory, SIZE, mr->lkey}, from = {(uintptr_t)memory + SIZE, SIZE, mr->lkey};
    struct ibv_recv_wr receive = {.sg_list = &into, .num_sge = 1}, *bad_receive;
    for (int i = 0; i < RECEIVES; i++)
        check(!ibv_post_recv(qp, &receive, &bad_receive), "ibv_post_recv");
    int tcp = connected(server, port);
    check(write(tcp, &own, sizeof own) == sizeof own, "write");
    check(read(tcp, &peer, sizeof peer) == sizeof peer, "read");
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer.qpn,
        .rq_psn = peer.psn, .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = peer.gid, .sgid_index = gid_index, .hop_limit = 64}}};
    check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "RTR");
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
        .sq_psn = own.psn, .max_rd_atomic = 1};
    check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                        IBV_QP_MAX_QP_RD_ATOMIC), "RTS");
    char ready = 0;
    check(write(tcp, &ready, 1) == 1 && read(tcp, &ready, 1) == 1, "ready");

    double *times = calloc(rounds, sizeof *times), last = now(), begin = last;
    check(times != NULL, "calloc");
    int sent = 0;
    for (int done = 0; done < rounds;) {
        if (server && sent == done)
            post(qp, &from, sent++);
        struct ibv_wc wc;
        int taken = ibv_poll_cq(cq, 1, &wc);
        check(taken >= 0, "ibv_poll_cq");
        if (!taken)
            continue;
        if (wc.status != IBV_WC_SUCCESS) {
            fprintf(stderr, "completion: %s\n", ibv_wc_status_str(wc.status));
            return 1;
        }
        if (wc.opcode != IBV_WC_RECV)
            continue;
        if (!server) // the answer first
            post(qp, &from, sent++);
        double t = now();
        times[done++] = t - last;
        last = t;
        check(!ibv_post_recv(qp, &receive, &bad_receive), "ibv_post_recv");
    }
    double mean = (last - begin) / rounds;
    // Neither ends before the other has all.
    check(write(tcp, &ready, 1) == 1 && read(tcp, &ready, 1) == 1, "end");
    if (server) {
        qsort(times, rounds, sizeof *times, compare);
        printf("%.2f %.2f\n", times[rounds / 2], mean);
    }
    ibv_destroy_qp(qp);
    ibv_destroy_cq(cq);
    ibv_dereg_mr(mr);
    ibv_dealloc_pd(pd);
    ibv_close_device(context);
    ibv_free_device_list(list);
    return 0;
}
