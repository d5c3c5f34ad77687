/* Queue pairs of any type, taken through the states one by one. For the test programs here. */
#ifndef VERBS_ANY_H
#define VERBS_ANY_H
#include "verbs_pair.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>

#define FAILS(call, wanted) do { int rc_ = (call); CHECK(rc_ == (wanted), "%s:%d: " #call " gives %d, not %d", __FILE__, __LINE__, rc_, (wanted)); } while (0)
#define MAKES_NOTHING(call, wanted) do { errno = 0; CHECK(!(call), "%s:%d: " #call " succeeds", __FILE__, __LINE__); \
    CHECK(errno == (wanted), "%s:%d: " #call " sets %s, not %s", __FILE__, __LINE__, strerror(errno), strerror(wanted)); } while (0)

#define BUFFER 65536
#define QKEY 0x1111

/* A queue pair with CQs of its own and a registered buffer. */
struct any {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_srq *srq;
    struct ibv_xrcd *xrcd; /* of an XRC target */
    struct ibv_qp *qp;
    enum ibv_qp_type type;
    unsigned char *buffer;
    struct ibv_mr *mr;
};

static inline int gid_index(void) { return getenv("GIDX") ? atoi(getenv("GIDX")) : 0; }

static inline struct any make_any(struct ibv_context *context, struct ibv_pd *pd, enum ibv_qp_type type)
{
    struct any any = {.context = context, .pd = pd, .type = type};
    any.send_cq = ibv_create_cq(context, 64, NULL, NULL, 0);
    any.recv_cq = ibv_create_cq(context, 64, NULL, NULL, 0);
    CHECK(any.send_cq && any.recv_cq, "create_cq: %s", strerror(errno));
    struct ibv_qp_init_attr_ex init = {.send_cq = any.send_cq, .recv_cq = any.recv_cq, .qp_type = type, .sq_sig_all = 1,
        .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2},
        .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd};
    if (type == IBV_QPT_XRC_RECV) {
        struct ibv_xrcd_init_attr xrcd = {.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT};
        init.xrcd = any.xrcd = ibv_open_xrcd(context, &xrcd);
        CHECK(any.xrcd, "open_xrcd: %s", strerror(errno));
        init.comp_mask = IBV_QP_INIT_ATTR_XRCD;
    }
    any.qp = ibv_create_qp_ex(context, &init);
    CHECK(any.qp, "create_qp_ex: %s", strerror(errno));
    any.buffer = aligned_alloc(4096, BUFFER);
    memset(any.buffer, 0, BUFFER);
    any.mr = ibv_reg_mr(pd, any.buffer, BUFFER, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
        IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
    CHECK(any.mr, "reg_mr: %s", strerror(errno));
    return any;
}

static inline void destroy_any(struct any *any)
{
    FAILS(ibv_destroy_qp(any->qp), 0);
    FAILS(ibv_destroy_cq(any->send_cq), 0);
    FAILS(ibv_destroy_cq(any->recv_cq), 0);
    if (any->srq)
        FAILS(ibv_destroy_srq(any->srq), 0);
    if (any->xrcd)
        FAILS(ibv_close_xrcd(any->xrcd), 0);
    FAILS(ibv_dereg_mr(any->mr), 0);
    free(any->buffer);
}

/* Attributes with which every transition succeeds, towards `peer`. */
static inline struct ibv_qp_attr good_attr(struct ibv_context *context, uint32_t peer)
{
    struct ibv_qp_attr attr = {.port_num = 1, .qkey = QKEY, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer, .rq_psn = 100,
        .sq_psn = 100, .max_dest_rd_atomic = 1, .max_rd_atomic = 1, .min_rnr_timer = 1, .timeout = 14, .retry_cnt = 2,
        .rnr_retry = 1, .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.hop_limit = 3, .sgid_index = gid_index()}}};
    CHECK(!ibv_query_gid(context, 1, gid_index(), &attr.ah_attr.grh.dgid), "query_gid: %s", strerror(errno));
    return attr;
}

/* The attributes that a transition of a type needs. */
static inline int needs(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to)
{
    int ud = type == IBV_QPT_UD, target = type == IBV_QPT_RC || type == IBV_QPT_XRC_RECV;
    int initiator = type == IBV_QPT_RC || type == IBV_QPT_XRC_SEND;
    if (from == IBV_QPS_RESET && to == IBV_QPS_INIT)
        return IBV_QP_PKEY_INDEX | IBV_QP_PORT | (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS);
    if (from == IBV_QPS_INIT && to == IBV_QPS_RTR)
        return ud ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
            (target ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0);
    if (from == IBV_QPS_RTR && to == IBV_QPS_RTS)
        return IBV_QP_SQ_PSN | (initiator || target ? IBV_QP_TIMEOUT : 0) |
            (initiator ? IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0);
    return 0;
}

/* Takes a queue pair from RESET to INIT, RTR or RTS. */
static inline void take_to(struct any *any, enum ibv_qp_state state, struct ibv_qp_attr attr)
{
    for (enum ibv_qp_state at = IBV_QPS_RESET; at < state; at++) {
        attr.qp_state = at + 1;
        int rc = ibv_modify_qp(any->qp, &attr, IBV_QP_STATE | needs(any->type, at, at + 1));
        CHECK(!rc, "from state %d to %d: %s", at, at + 1, strerror(rc));
    }
}

static inline int simply_to(struct any *any, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = {.qp_state = state};
    return ibv_modify_qp(any->qp, &attr, IBV_QP_STATE);
}

static inline enum ibv_qp_state state_of(struct any *any)
{
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    FAILS(ibv_query_qp(any->qp, &attr, IBV_QP_STATE, &init), 0);
    return attr.qp_state;
}

/* Two queue pairs in RTS that are connected to each other. */
static inline void make_two(struct any two[2], struct ibv_context *context, struct ibv_pd *pd, enum ibv_qp_type type)
{
    for (int i = 0; i < 2; i++)
        two[i] = make_any(context, pd, type);
    for (int i = 0; i < 2; i++)
        take_to(&two[i], IBV_QPS_RTS, good_attr(context, two[!i].qp->qp_num));
}

static inline struct ibv_wc next_wc(struct ibv_cq *cq)
{
    struct ibv_wc wc;
    time_t end = time(NULL) + 30;
    int n;
    while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
        CHECK(time(NULL) < end, "no completion in 30 s");
    CHECK(n == 1, "poll_cq: %d", n);
    return wc;
}

static inline int post_one(struct any *any, struct ibv_sge *sge, struct ibv_send_wr wr)
{
    struct ibv_send_wr *bad;
    wr.sg_list = sge;
    wr.num_sge = sge != NULL;
    return ibv_post_send(any->qp, &wr, &bad);
}

static inline int receive_one(struct any *any, uint64_t wr_id, struct ibv_sge sge)
{
    struct ibv_recv_wr *bad, wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1};
    return any->srq ? ibv_post_srq_recv(any->srq, &wr, &bad) : ibv_post_recv(any->qp, &wr, &bad);
}

/* An entry of the buffer. */
static inline struct ibv_sge piece(struct any *any, uint32_t offset, uint32_t length)
{
    return (struct ibv_sge){(uintptr_t)any->buffer + offset, length, any->mr->lkey};
}

static inline int readable(int fd, int milliseconds)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, milliseconds) == 1;
}

/* The next asynchronous event, at most 30 s from now. */
static inline struct ibv_async_event next_event(struct ibv_context *context)
{
    struct ibv_async_event event;
    CHECK(readable(context->async_fd, 30000), "no event in 30 s");
    CHECK(!ibv_get_async_event(context, &event), "get_async_event: %s", strerror(errno));
    return event;
}

static inline struct ibv_ah *handle_to(struct ibv_pd *pd, struct ibv_qp_attr attr)
{
    struct ibv_ah *ah = ibv_create_ah(pd, &attr.ah_attr);
    CHECK(ah, "create_ah: %s", strerror(errno));
    return ah;
}

struct test_case {
    const char *name;
    void (*run)(void);
};

/* Runs the case that the program's only argument names, with a device and a PD, which it must leave as it found them. */
static inline int run_case(int argc, char **argv, const struct test_case *cases, size_t count, struct ibv_context **context,
                           struct ibv_pd **pd)
{
    alarm(60);
    *context = open_device();
    *pd = ibv_alloc_pd(*context);
    CHECK(*pd, "alloc_pd: %s", strerror(errno));
    for (size_t i = 0; i < count; i++)
        if (argc == 2 && !strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            FAILS(ibv_dealloc_pd(*pd), 0);
            FAILS(ibv_close_device(*context), 0);
            puts("ok");
            return 0;
        }
    die("usage: %s CASE", argv[0]);
}
#endif
