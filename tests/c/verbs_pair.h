/* Two RC queue pairs of one process, connected to each other over the device's own address. For the test programs here. */
#ifndef VERBS_PAIR_H
#define VERBS_PAIR_H
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Says what failed, on one line, and ends the process. */
static inline void die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
static inline void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("FAILED: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    _exit(1);
}
#define CHECK(condition, ...) ((condition) ? (void)0 : die(__VA_ARGS__))

/* What one side tells the other before they connect. */
struct address {
    uint32_t qpn, psn;
    union ibv_gid gid;
};

/* One side: a device, and a queue pair whose sends and receives complete into one queue. */
struct side {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct address address;
};

#define DEPTH 64 /* work requests of each queue */
static enum ibv_mtu path_mtu = IBV_MTU_1024; /* of pairs that are connected from now on */

/* Opens the device named by DEV (ferroce_lo). */
static inline struct ibv_context *open_device(void)
{
    const char *name = getenv("DEV") ? getenv("DEV") : "ferroce_lo";
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = NULL;
    CHECK(list, "no device list: %s", strerror(errno));
    for (int i = 0; list[i]; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name))
            context = ibv_open_device(list[i]);
    CHECK(context, "cannot open %s: %s", name, strerror(errno));
    ibv_free_device_list(list);
    return context;
}

/* Makes a queue pair on an open device; it is not connected yet. */
static inline struct side make_side(struct ibv_context *context, struct ibv_pd *pd)
{
    struct side side = {.context = context, .pd = pd};
    int gid_index = getenv("GIDX") ? atoi(getenv("GIDX")) : 0;
    side.cq = ibv_create_cq(context, 2 * DEPTH, NULL, NULL, 0);
    CHECK(side.cq, "create_cq: %s", strerror(errno));
    struct ibv_qp_init_attr init = {
        .send_cq = side.cq, .recv_cq = side.cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1},
    };
    side.qp = ibv_create_qp(pd, &init);
    CHECK(side.qp, "create_qp: %s", strerror(errno));
    side.address.qpn = side.qp->qp_num;
    side.address.psn = 0x123456;
    CHECK(!ibv_query_gid(context, 1, gid_index, &side.address.gid), "query_gid: %s", strerror(errno));
    return side;
}

/* Takes a queue pair to RTS, towards the peer. */
static inline void connect_side(struct side *side, const struct address *peer)
{
    int rc;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC};
    rc = ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    CHECK(!rc, "to INIT: %s", strerror(rc));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = path_mtu, .dest_qp_num = peer->qpn,
        .rq_psn = peer->psn, .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = peer->gid, .hop_limit = 1,
            .sgid_index = getenv("GIDX") ? atoi(getenv("GIDX")) : 0}}};
    rc = ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
        IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    CHECK(!rc, "to RTR: %s", strerror(rc));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 6, .rnr_retry = 7, /* rxe takes a retry count of 7 for ever */
        .sq_psn = side->address.psn, .max_rd_atomic = 1};
    rc = ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
        IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    CHECK(!rc, "to RTS: %s", strerror(rc));
}

/* Two sides in one process, connected to each other. */
static inline void make_pair(struct side pair[2])
{
    struct ibv_context *context = open_device();
    struct ibv_pd *pd = ibv_alloc_pd(context);
    CHECK(pd, "alloc_pd: %s", strerror(errno));
    pair[0] = make_side(context, pd);
    pair[1] = make_side(context, pd);
    connect_side(&pair[0], &pair[1].address);
    connect_side(&pair[1], &pair[0].address);
}

/* Destroys all of a pair, and closes its device. */
static inline void destroy_pair(struct side pair[2])
{
    for (int i = 0; i < 2; i++) {
        CHECK(!ibv_destroy_qp(pair[i].qp), "destroy_qp: %s", strerror(errno));
        CHECK(!ibv_destroy_cq(pair[i].cq), "destroy_cq: %s", strerror(errno));
    }
    CHECK(!ibv_dealloc_pd(pair[0].pd), "dealloc_pd: %s", strerror(errno));
    CHECK(!ibv_close_device(pair[0].context), "close_device: %s", strerror(errno));
}

static inline struct ibv_mr *reg(struct side *side, void *address, size_t length)
{
    struct ibv_mr *mr = ibv_reg_mr(side->pd, address, length, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr, "reg_mr of %zu bytes: %s", length, strerror(errno));
    return mr;
}

/* Posts a SEND of a registered range; returns what ibv_post_send returns. */
static inline int send_from(struct side *side, void *address, uint32_t length, struct ibv_mr *mr)
{
    struct ibv_sge sge = {.addr = (uintptr_t)address, .length = length, .lkey = mr->lkey};
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND};
    return ibv_post_send(side->qp, &wr, &bad);
}

/* Posts a receive into a registered range. */
static inline int receive_into(struct side *side, void *address, uint32_t length, struct ibv_mr *mr)
{
    struct ibv_sge sge = {.addr = (uintptr_t)address, .length = length, .lkey = mr->lkey};
    struct ibv_recv_wr *bad, wr = {.sg_list = &sge, .num_sge = 1};
    return ibv_post_recv(side->qp, &wr, &bad);
}

/* Polls for one completion, at most 30 s, and returns its status. */
static inline enum ibv_wc_status next_status(struct side *side)
{
    time_t end = time(NULL) + 30;
    struct ibv_wc wc;
    int n;
    while ((n = ibv_poll_cq(side->cq, 1, &wc)) == 0)
        CHECK(time(NULL) < end, "no completion in 30 s");
    CHECK(n == 1, "poll_cq: %d", n);
    return wc.status;
}

/* One message from pair[0] to pair[1], checked byte for byte. */
static inline void transfer(struct side pair[2], unsigned char *from, struct ibv_mr *from_mr,
    unsigned char *to, struct ibv_mr *to_mr, uint32_t length, unsigned char seed)
{
    for (uint32_t i = 0; i < length; i++)
        from[i] = (unsigned char)(seed + i * 7);
    memset(to, 0, length);
    CHECK(!receive_into(&pair[1], to, length, to_mr), "post_recv");
    CHECK(!send_from(&pair[0], from, length, from_mr), "post_send");
    enum ibv_wc_status status = next_status(&pair[1]);
    CHECK(status == IBV_WC_SUCCESS, "receive: %s", ibv_wc_status_str(status));
    status = next_status(&pair[0]);
    CHECK(status == IBV_WC_SUCCESS, "send: %s", ibv_wc_status_str(status));
    CHECK(!memcmp(from, to, length), "the data arrived damaged");
}
#endif
