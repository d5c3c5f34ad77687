/* xrc CASE: extended reliable connections: domains and the files that name them, shared receive queues reached by
 * number, targets with several users, and what is refused. */
#include "verbs_pair.h"
#include <fcntl.h>
#include <poll.h>

#define LENGTH 4096
#define ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define FAILS(call, wanted) do { int rc_ = (call); CHECK(rc_ == (wanted), #call " gives %d, not %d", rc_, (wanted)); } while (0)
#define MAKES_NOTHING(call, wanted) do { errno = 0; CHECK(!(call), #call " succeeds"); \
    CHECK(errno == (wanted), #call " sets %s, not %s", strerror(errno), strerror(wanted)); } while (0)

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *send_cq, *cqs[2];
static struct ibv_xrcd *xrcd;
static struct ibv_srq *srqs[2];
static uint32_t numbers[2];
static struct ibv_qp *initiator, *target;
static unsigned char *from, *to;
static struct ibv_mr *from_mr, *to_mr;

static struct ibv_xrcd *open_xrcd(struct ibv_context *of, int fd, int flags)
{
    struct ibv_xrcd_init_attr attr = {.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd, .oflags = flags};
    return ibv_open_xrcd(of, &attr);
}

/* An SRQ in a PD, its domain and its CQ, all of one context. */
static struct ibv_srq *make_srq(struct ibv_pd *in, struct ibv_xrcd *domain, struct ibv_cq *cq)
{
    struct ibv_srq_init_attr_ex attr = {.attr = {.max_wr = 16, .max_sge = 1}, .srq_type = IBV_SRQT_XRC, .pd = in,
        .xrcd = domain, .cq = cq, .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD |
            IBV_SRQ_INIT_ATTR_CQ};
    return ibv_create_srq_ex(in->context, &attr);
}

static struct ibv_qp *make_target(struct ibv_xrcd *domain)
{
    struct ibv_qp_init_attr_ex attr = {.qp_type = IBV_QPT_XRC_RECV, .xrcd = domain, .comp_mask = IBV_QP_INIT_ATTR_XRCD};
    return ibv_create_qp_ex(context, &attr);
}

/* One half connected to the other, with the attributes of both halves, as programs do. */
static void connect_half(struct ibv_qp *qp, uint32_t peer)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC};
    int rc = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    CHECK(!rc, "to INIT: %s", strerror(rc));
    int gid_index = getenv("GIDX") ? atoi(getenv("GIDX")) : 0;
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer, .rq_psn = 0xfffff0,
        .max_dest_rd_atomic = 4, .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.hop_limit = 1, .sgid_index = gid_index}}};
    CHECK(!ibv_query_gid(context, 1, gid_index, &attr.ah_attr.grh.dgid), "query_gid: %s", strerror(errno));
    rc = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    CHECK(!rc, "to RTR: %s", strerror(rc));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = 0xfffff0,
        .max_rd_atomic = 4};
    rc = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
        IBV_QP_MAX_QP_RD_ATOMIC);
    CHECK(!rc, "to RTS: %s", strerror(rc));
}

/* An initiator and a target of a domain with two SRQs, each with its CQ. */
static void start(void)
{
    context = open_device();
    pd = ibv_alloc_pd(context);
    CHECK(pd, "alloc_pd: %s", strerror(errno));
    from = aligned_alloc(4096, LENGTH);
    to = aligned_alloc(4096, LENGTH);
    from_mr = ibv_reg_mr(pd, from, LENGTH, ACCESS);
    to_mr = ibv_reg_mr(pd, to, LENGTH, ACCESS);
    CHECK(from_mr && to_mr, "reg_mr: %s", strerror(errno));
    xrcd = open_xrcd(context, -1, O_CREAT);
    CHECK(xrcd, "open_xrcd: %s", strerror(errno));
    send_cq = ibv_create_cq(context, 64, NULL, NULL, 0);
    CHECK(send_cq, "create_cq: %s", strerror(errno));
    for (int i = 0; i < 2; i++) {
        cqs[i] = ibv_create_cq(context, 64, NULL, NULL, 0);
        CHECK(cqs[i], "create_cq: %s", strerror(errno));
        srqs[i] = make_srq(pd, xrcd, cqs[i]);
        CHECK(srqs[i], "create_srq_ex: %s", strerror(errno));
        CHECK(!ibv_get_srq_num(srqs[i], &numbers[i]), "get_srq_num");
    }
    CHECK(numbers[0] != numbers[1] && !(numbers[0] >> 24), "SRQ numbers %#x and %#x", numbers[0], numbers[1]);
    struct ibv_qp_init_attr_ex init = {.qp_type = IBV_QPT_XRC_SEND, .send_cq = send_cq, .pd = pd, .sq_sig_all = 1,
        .cap = {.max_send_wr = 16, .max_send_sge = 1, .max_inline_data = 64},
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
            IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD};
    initiator = ibv_create_qp_ex(context, &init);
    CHECK(initiator, "an initiator: %s", strerror(errno));
    target = make_target(xrcd);
    CHECK(target, "a target: %s", strerror(errno));
    CHECK(!target->pd && !target->send_cq && !target->recv_cq && !target->srq, "a target has objects");
    connect_half(initiator, target->qp_num);
    connect_half(target, initiator->qp_num);
}

static struct ibv_wc next(struct ibv_cq *cq)
{
    time_t end = time(NULL) + 30;
    struct ibv_wc wc;
    int n;
    while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
        CHECK(time(NULL) < end, "no completion in 30 s");
    CHECK(n == 1, "poll_cq: %d", n);
    return wc;
}

static void receive_by(struct ibv_mr *mr, struct ibv_srq *srq, uint64_t wr_id)
{
    struct ibv_sge sge = {.addr = (uintptr_t)to, .length = LENGTH, .lkey = mr->lkey};
    struct ibv_recv_wr *bad, wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1};
    FAILS(ibv_post_srq_recv(srq, &wr, &bad), 0);
}

static void receive(struct ibv_srq *srq, uint64_t wr_id) { receive_by(to_mr, srq, wr_id); }

/* Posts a SEND to the SRQ with this number. */
static int send_to(uint32_t number)
{
    struct ibv_sge sge = {.addr = (uintptr_t)from, .length = LENGTH, .lkey = from_mr->lkey};
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .qp_type.xrc.remote_srqn = number};
    return ibv_post_send(initiator, &wr, &bad);
}

static void messages(void)
{
    start();
    for (int i = 0; i < 2; i++)
        receive(srqs[i], 10 + i);
    for (int i = 1; i >= 0; i--) {
        memset(from, 'a' + i, LENGTH);
        FAILS(send_to(numbers[i]), 0);
        struct ibv_wc wc = next(cqs[i]);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)10 + i, "receive: %s", ibv_wc_status_str(wc.status));
        CHECK(wc.qp_num == target->qp_num && wc.src_qp == initiator->qp_num, "a receive of other QPs");
        CHECK(!memcmp(from, to, LENGTH), "the data arrived damaged");
        CHECK(next(send_cq).status == IBV_WC_SUCCESS, "send");
    }
    /* The extended way, with the other operations. */
    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(initiator);
    CHECK(ex, "no ibv_qp_ex");
    receive(srqs[0], 20);
    uint64_t word = 40;
    memcpy(to, &word, 8);
    ibv_wr_start(ex);
    ex->wr_flags = IBV_SEND_SIGNALED;
    ex->wr_id = 1;
    ibv_wr_atomic_fetch_add(ex, to_mr->rkey, (uintptr_t)to, 2);
    ibv_wr_set_xrc_srqn(ex, numbers[1]);
    ibv_wr_set_sge(ex, from_mr->lkey, (uintptr_t)from, 8);
    ex->wr_id = 2;
    ibv_wr_rdma_read(ex, to_mr->rkey, (uintptr_t)to);
    ibv_wr_set_xrc_srqn(ex, numbers[1]);
    ibv_wr_set_sge(ex, from_mr->lkey, (uintptr_t)from + 8, 8);
    ex->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE;
    ex->wr_id = 3;
    ibv_wr_rdma_write(ex, to_mr->rkey, (uintptr_t)to + 8);
    ibv_wr_set_xrc_srqn(ex, numbers[0]);
    ibv_wr_set_sge(ex, from_mr->lkey, (uintptr_t)from, 16);
    ex->wr_id = 4;
    ibv_wr_send_imm(ex, 0x12345678);
    ibv_wr_set_xrc_srqn(ex, numbers[0]);
    ibv_wr_set_inline_data(ex, "inline", 6);
    FAILS(ibv_wr_complete(ex), 0);
    for (uint64_t id = 1; id <= 4; id++) {
        struct ibv_wc wc = next(send_cq);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == id, "operation %d: %s", (int)id, ibv_wc_status_str(wc.status));
    }
    struct ibv_wc wc = next(cqs[0]);
    CHECK(wc.wr_id == 20 && wc.byte_len == 6 && wc.imm_data == 0x12345678, "the SEND with immediate data");
    uint64_t words[2];
    memcpy(words, to + 8, 16);
    CHECK(!memcmp(to, "inline", 6) && words[0] == 40 && words[1] == 42, "fetched %d and %d", (int)words[0], (int)words[1]);
}

static void domains(void)
{
    start();
    char path[] = "/tmp/xrc-XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0, "mkstemp: %s", strerror(errno));
    int again = open(path, O_RDONLY);
    CHECK(again >= 0 && !unlink(path), "open: %s", strerror(errno));
    MAKES_NOTHING(open_xrcd(context, fd, 0), EAGAIN);
    struct ibv_xrcd *first = open_xrcd(context, fd, O_CREAT | O_EXCL);
    CHECK(first, "open_xrcd: %s", strerror(errno));
    MAKES_NOTHING(open_xrcd(context, fd, O_CREAT | O_EXCL), EINVAL);
    CHECK(!close(fd), "close");
    /* By another descriptor of the same file, and from another context. */
    struct ibv_context *other = open_device();
    struct ibv_xrcd *second = open_xrcd(other, again, 0);
    CHECK(second, "open_xrcd: %s", strerror(errno));
    struct ibv_xrcd *private = open_xrcd(context, -1, 0);
    CHECK(private, "open_xrcd: %s", strerror(errno));
    MAKES_NOTHING(open_xrcd(context, 999, O_CREAT), EBADF);
    struct ibv_xrcd_init_attr attr = {.comp_mask = IBV_XRCD_INIT_ATTR_FD, .fd = -1};
    MAKES_NOTHING(ibv_open_xrcd(context, &attr), EINVAL);
    attr.comp_mask = 0xff;
    MAKES_NOTHING(ibv_open_xrcd(context, &attr), EOPNOTSUPP);
    /* Busy are those that something was made with. */
    struct ibv_srq *srq = make_srq(pd, first, cqs[0]);
    CHECK(srq, "create_srq_ex: %s", strerror(errno));
    FAILS(ibv_close_xrcd(first), EBUSY);
    FAILS(ibv_close_xrcd(second), 0);
    FAILS(ibv_close_xrcd(private), 0);
    FAILS(ibv_destroy_cq(cqs[0]), EBUSY);
    FAILS(ibv_destroy_srq(srq), 0);
    struct ibv_qp *qp = make_target(first);
    CHECK(qp, "a target: %s", strerror(errno));
    FAILS(ibv_close_xrcd(first), EBUSY);
    FAILS(ibv_destroy_qp(qp), 0);
    FAILS(ibv_close_xrcd(first), 0);
    MAKES_NOTHING(open_xrcd(context, again, 0), EAGAIN);
    CHECK(!ibv_close_device(other), "close_device");
}

static int readable(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 5000) == 1;
}

/* The next event of a context is this one, of this QP. */
static void expect(struct ibv_context *of, enum ibv_event_type type, struct ibv_qp *qp)
{
    struct ibv_async_event event;
    CHECK(readable(of->async_fd), "no event");
    CHECK(!ibv_get_async_event(of, &event), "get_async_event: %s", strerror(errno));
    CHECK(event.event_type == type && event.element.qp == qp, "event %s", ibv_event_type_str(event.event_type));
    ibv_ack_async_event(&event);
}

static void shared_target(void)
{
    start();
    int fd = open("/proc/self/exe", O_RDONLY);
    struct ibv_xrcd *mine = open_xrcd(context, fd, O_CREAT);
    struct ibv_context *other = open_device();
    struct ibv_xrcd *theirs = open_xrcd(other, fd, 0);
    CHECK(mine && theirs, "open_xrcd: %s", strerror(errno));
    struct ibv_pd *their_pd = ibv_alloc_pd(other);
    struct ibv_cq *their_cq = ibv_create_cq(other, 64, NULL, NULL, 0);
    CHECK(their_pd && their_cq, "alloc_pd or create_cq: %s", strerror(errno));
    struct ibv_mr *their_mr = ibv_reg_mr(their_pd, to, LENGTH, ACCESS);
    CHECK(their_mr, "reg_mr: %s", strerror(errno));
    struct ibv_qp *made = make_target(mine);
    struct ibv_srq *srq = make_srq(their_pd, theirs, their_cq);
    uint32_t number;
    CHECK(made && srq && !ibv_get_srq_num(srq, &number), "a target and an SRQ: %s", strerror(errno));
    struct ibv_qp_open_attr attr = {.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE |
            IBV_QP_OPEN_ATTR_CONTEXT, .qp_num = made->qp_num, .xrcd = theirs, .qp_type = IBV_QPT_XRC_RECV, .qp_context = &number};
    struct ibv_qp *opened = ibv_open_qp(other, &attr);
    CHECK(opened, "open_qp: %s", strerror(errno));
    CHECK(opened->qp_num == made->qp_num && opened->qp_context == &number && opened->context == other, "open_qp");
    attr.qp_num ^= 1;
    MAKES_NOTHING(ibv_open_qp(other, &attr), EINVAL);
    attr.qp_num = target->qp_num; /* of another domain */
    MAKES_NOTHING(ibv_open_qp(other, &attr), EINVAL);
    attr.qp_num = made->qp_num;
    attr.qp_type = IBV_QPT_RC;
    MAKES_NOTHING(ibv_open_qp(other, &attr), EINVAL);
    attr.comp_mask = IBV_QP_OPEN_ATTR_NUM;
    MAKES_NOTHING(ibv_open_qp(other, &attr), EINVAL);
    /* Connected by one handle, used by all; its SRQ is the other context's. */
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
    FAILS(ibv_modify_qp(initiator, &reset, IBV_QP_STATE), 0);
    connect_half(initiator, made->qp_num);
    connect_half(opened, initiator->qp_num);
    struct ibv_qp_attr now;
    struct ibv_qp_init_attr init;
    FAILS(ibv_query_qp(made, &now, IBV_QP_STATE, &init), 0);
    CHECK(now.qp_state == IBV_QPS_RTS && init.qp_type == IBV_QPT_XRC_RECV, "state %d", now.qp_state);
    receive_by(their_mr, srq, 1);
    FAILS(send_to(number), 0);
    CHECK(next(their_cq).status == IBV_WC_SUCCESS && next(send_cq).status == IBV_WC_SUCCESS, "a message");
    /* Each user has the events, and the last one ends it. */
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    FAILS(ibv_modify_qp(made, &error, IBV_QP_STATE), 0);
    expect(context, IBV_EVENT_QP_LAST_WQE_REACHED, made);
    expect(other, IBV_EVENT_QP_LAST_WQE_REACHED, opened);
    FAILS(ibv_close_xrcd(theirs), EBUSY);
    FAILS(ibv_destroy_qp(made), 0);
    FAILS(ibv_close_xrcd(mine), 0);
    FAILS(ibv_query_qp(opened, &now, IBV_QP_STATE, &init), 0);
    FAILS(ibv_destroy_srq(srq), 0);
    FAILS(ibv_destroy_qp(opened), 0);
    FAILS(ibv_close_xrcd(theirs), 0);
    FAILS(ibv_dereg_mr(their_mr), 0);
    FAILS(ibv_destroy_cq(their_cq), 0);
    FAILS(ibv_dealloc_pd(their_pd), 0);
    CHECK(!ibv_close_device(other), "close_device");
}

static void limit(void)
{
    start();
    receive(srqs[0], 1);
    receive(srqs[0], 2);
    struct ibv_srq_attr attr = {.srq_limit = 2};
    FAILS(ibv_modify_srq(srqs[0], &attr, IBV_SRQ_LIMIT), 0);
    FAILS(send_to(numbers[0]), 0);
    struct ibv_async_event event;
    CHECK(readable(context->async_fd) && !ibv_get_async_event(context, &event), "no event");
    CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srqs[0], "another event");
    ibv_ack_async_event(&event);
    FAILS(ibv_query_srq(srqs[0], &attr), 0);
    CHECK(attr.srq_limit == 0, "the limit is still armed");
    CHECK(next(cqs[0]).status == IBV_WC_SUCCESS, "receive");
}

static void errors(void)
{
    start();
    struct ibv_recv_wr *bad_recv, recv = {.num_sge = 0};
    FAILS(ibv_post_recv(initiator, &recv, &bad_recv), EINVAL);
    FAILS(ibv_post_recv(target, &recv, &bad_recv), EINVAL);
    struct ibv_send_wr *bad_send, send = {.opcode = IBV_WR_SEND};
    FAILS(ibv_post_send(target, &send, &bad_send), EINVAL);
    MAKES_NOTHING(make_target(NULL), EINVAL);
    struct ibv_qp_init_attr plain = {.qp_type = IBV_QPT_XRC_RECV, .send_cq = send_cq, .recv_cq = send_cq};
    MAKES_NOTHING(ibv_create_qp(pd, &plain), EINVAL);
    plain.qp_type = IBV_QPT_XRC_SEND;
    plain.send_cq = NULL;
    MAKES_NOTHING(ibv_create_qp(pd, &plain), EINVAL);
    plain = (struct ibv_qp_init_attr){.qp_type = IBV_QPT_RC, .send_cq = send_cq, .recv_cq = send_cq, .srq = srqs[0]};
    MAKES_NOTHING(ibv_create_qp(pd, &plain), EINVAL);
    struct ibv_srq_init_attr_ex attr = {.attr = {.max_wr = 1}, .srq_type = IBV_SRQT_XRC, .pd = pd,
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD};
    MAKES_NOTHING(ibv_create_srq_ex(context, &attr), EINVAL);
    attr.srq_type = IBV_SRQT_TM;
    MAKES_NOTHING(ibv_create_srq_ex(context, &attr), EOPNOTSUPP);
    /* A basic SRQ by the extended call, with more attributes than it needs; peers can't use its number. */
    attr = (struct ibv_srq_init_attr_ex){.attr = {.max_wr = 4, .max_sge = 1}, .srq_type = IBV_SRQT_BASIC, .pd = pd,
        .xrcd = xrcd, .cq = send_cq, .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD |
            IBV_SRQ_INIT_ATTR_CQ};
    struct ibv_srq *basic = ibv_create_srq_ex(context, &attr);
    uint32_t number;
    CHECK(basic && !ibv_get_srq_num(basic, &number), "a basic SRQ: %s", strerror(errno));
    receive(basic, 1);
    FAILS(send_to(number), 0);
    struct ibv_wc wc = next(send_cq);
    CHECK(wc.status == IBV_WC_REM_INV_REQ_ERR, "a SEND to a basic SRQ: %s", ibv_wc_status_str(wc.status));
    expect(context, IBV_EVENT_QP_REQ_ERR, target);
    expect(context, IBV_EVENT_QP_LAST_WQE_REACHED, target);
    /* SRQs that nobody was made with go at any time, and what is in their CQs with them. */
    for (int i = 0; i < 2; i++)
        FAILS(ibv_destroy_srq(srqs[i]), 0);
    FAILS(ibv_destroy_srq(basic), 0);
    FAILS(ibv_destroy_qp(target), 0);
    FAILS(ibv_destroy_qp(initiator), 0);
    FAILS(ibv_close_xrcd(xrcd), 0);
    FAILS(ibv_destroy_cq(cqs[0]), 0);
}

int main(int argc, char **argv)
{
    static const struct { const char *name; void (*run)(void); } cases[] = {
        {"messages", messages}, {"domains", domains}, {"shared-target", shared_target}, {"limit", limit}, {"errors", errors},
    };
    for (size_t i = 0; argc == 2 && i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            return 0;
        }
    die("usage: xrc messages|domains|shared-target|limit|errors");
}
