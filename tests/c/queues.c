/* queues CASE: completion queues, the limits of all objects, what is in use, and what the device says of itself. */
#include "verbs_any.h"
#include <sys/resource.h>

static struct ibv_context *context;
static struct ibv_pd *pd;

/* A QP pair whose receiver completes into this CQ. */
static void make_two_on(struct any two[2], struct ibv_cq *cq)
{
    for (int i = 0; i < 2; i++)
        two[i] = make_any(context, pd, IBV_QPT_RC);
    FAILS(ibv_destroy_qp(two[1].qp), 0);
    FAILS(ibv_destroy_cq(two[1].recv_cq), 0);
    two[1].recv_cq = cq;
    struct ibv_qp_init_attr init = {.send_cq = two[1].send_cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
        .cap = {.max_send_wr = 16, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1}};
    two[1].qp = ibv_create_qp(pd, &init);
    CHECK(two[1].qp, "create_qp: %s", strerror(errno));
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr attr = good_attr(context, two[!i].qp->qp_num);
        attr.rnr_retry = 7; /* for ever */
        take_to(&two[i], IBV_QPS_RTS, attr);
    }
}

static void message(struct any two[2], uint64_t wr_id, int flags)
{
    struct ibv_sge sge = piece(&two[0], 0, 100);
    FAILS(receive_one(&two[1], wr_id, piece(&two[1], 0, 100)), 0);
    FAILS(post_one(&two[0], &sge, (struct ibv_send_wr){.opcode = IBV_WR_SEND_WITH_IMM, .imm_data = 9, .send_flags = flags}), 0);
    CHECK(next_wc(two[0].send_cq).status == IBV_WC_SUCCESS, "send");
}

/* Every field that an extended CQ may have, alone and all together. */
static void fields(void)
{
    uint64_t all = 0;
    for (int bit = 0; bit < 64; bit++) {
        struct ibv_cq_init_attr_ex attr = {.cqe = 4, .wc_flags = 1ull << bit};
        errno = 0;
        struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &attr);
        int lacks = attr.wc_flags == IBV_WC_EX_WITH_CVLAN || attr.wc_flags == IBV_WC_EX_WITH_TM_INFO || bit > 11;
        CHECK(lacks ? !cq && errno == EOPNOTSUPP : !!cq, "wc_flags %#llx: %s", (unsigned long long)attr.wc_flags, strerror(errno));
        if (cq) {
            all |= attr.wc_flags;
            FAILS(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
        }
    }
    struct ibv_cq_init_attr_ex wrong = {.cqe = 4, .comp_mask = 1 << 5};
    MAKES_NOTHING(ibv_create_cq_ex(context, &wrong), EINVAL);
    wrong.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS, wrong.flags = 1 << 9;
    MAKES_NOTHING(ibv_create_cq_ex(context, &wrong), EINVAL);
    wrong.comp_mask = 0, wrong.cqe = 0;
    MAKES_NOTHING(ibv_create_cq_ex(context, &wrong), EINVAL);
    wrong.cqe = 4, wrong.comp_vector = context->num_comp_vectors;
    MAKES_NOTHING(ibv_create_cq_ex(context, &wrong), EINVAL);

    struct ibv_cq_init_attr_ex attr = {.cqe = 64, .cq_context = &all, .wc_flags = all, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
        .flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED};
    struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &attr);
    CHECK(cq && cq->cq_context == &all, "create_cq_ex: %s", strerror(errno));
    struct any two[2];
    make_two_on(two, ibv_cq_ex_to_cq(cq));
    struct ibv_poll_cq_attr poll_attr = {.comp_mask = 1};
    FAILS(ibv_start_poll(cq, &poll_attr), EINVAL);
    poll_attr.comp_mask = 0;
    FAILS(ibv_start_poll(cq, &poll_attr), ENOENT);
    for (int i = 0; i < 5; i++)
        message(two, i, 0);
    FAILS(ibv_start_poll(cq, &poll_attr), 0);
    CHECK(cq->wr_id == 0 && cq->status == IBV_WC_SUCCESS && ibv_wc_read_opcode(cq) == IBV_WC_RECV, "the first");
    CHECK(ibv_wc_read_byte_len(cq) == 100 && ibv_wc_read_imm_data(cq) == 9 && ibv_wc_read_wc_flags(cq) == IBV_WC_WITH_IMM, "data");
    CHECK(ibv_wc_read_qp_num(cq) == two[1].qp->qp_num && ibv_wc_read_vendor_err(cq) == 0, "QP");
    CHECK(ibv_wc_read_slid(cq) == 0 && ibv_wc_read_sl(cq) == 0 && ibv_wc_read_dlid_path_bits(cq) == 0, "LIDs");
    CHECK(ibv_wc_read_flow_tag(cq) == 0 && ibv_wc_read_completion_ts(cq) && ibv_wc_read_completion_wallclock_ns(cq), "the rest");
    uint64_t stamp = ibv_wc_read_completion_ts(cq), wall = ibv_wc_read_completion_wallclock_ns(cq);
    FAILS(ibv_next_poll(cq), 0);
    CHECK(cq->wr_id == 1 && ibv_wc_read_completion_ts(cq) >= stamp, "the second");
    int64_t apart = ibv_wc_read_completion_ts(cq) - stamp, wall_apart = ibv_wc_read_completion_wallclock_ns(cq) - wall;
    CHECK(llabs(apart - wall_apart) < 1000000000, "the clocks differ by %lld ns", (long long)(apart - wall_apart));
    ibv_end_poll(cq);
    /* The rest in the plain way, which shares the queue. */
    for (uint64_t i = 2; i < 5; i++)
        CHECK(next_wc(ibv_cq_ex_to_cq(cq)).wr_id == i, "the plain way");
    FAILS(ibv_start_poll(cq, &poll_attr), ENOENT);
    message(two, 7, 0);
    FAILS(ibv_start_poll(cq, &poll_attr), 0);
    FAILS(ibv_next_poll(cq), ENOENT);
    CHECK(cq->wr_id == 7, "what was read last stays");
    ibv_end_poll(cq);
    destroy_any(&two[0]);
    destroy_any(&two[1]);
}

/* Only what the sender asked an event for, and errors. */
static void solicited(void)
{
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    CHECK(channel, "create_comp_channel: %s", strerror(errno));
    struct ibv_cq *cq = ibv_create_cq(context, 64, &channel, channel, context->num_comp_vectors - 1), *of;
    void *cq_context;
    struct any two[2];
    make_two_on(two, cq);
    FAILS(ibv_req_notify_cq(cq, 1), 0);
    message(two, 1, 0);
    CHECK(!readable(channel->fd, 0), "an event for a message that is not solicited");
    message(two, 2, IBV_SEND_SOLICITED);
    CHECK(readable(channel->fd, 30000), "no event");
    FAILS(ibv_get_cq_event(channel, &of, &cq_context), 0);
    CHECK(of == cq && cq_context == &channel, "another CQ");
    message(two, 3, IBV_SEND_SOLICITED);
    CHECK(!readable(channel->fd, 0), "a second event");
    /* What came since the event, and was not polled, counts when it is armed again, as on hardware. */
    FAILS(ibv_req_notify_cq(cq, 1), 0);
    CHECK(readable(channel->fd, 30000), "no event for what came before");
    FAILS(ibv_get_cq_event(channel, &of, &cq_context), 0);
    for (uint64_t i = 1; i <= 3; i++)
        CHECK(next_wc(cq).wr_id == i, "completion %d", (int)i);
    /* Any, then solicited: any it stays. */
    FAILS(ibv_req_notify_cq(cq, 0), 0);
    FAILS(ibv_req_notify_cq(cq, 1), 0);
    CHECK(!readable(channel->fd, 0), "an event for what was polled");
    message(two, 4, 0);
    CHECK(readable(channel->fd, 30000), "no event");
    FAILS(ibv_get_cq_event(channel, &of, &cq_context), 0);
    CHECK(next_wc(cq).wr_id == 4, "completion 4");
    FAILS(ibv_req_notify_cq(cq, 1), 0);
    CHECK(!readable(channel->fd, 0), "an event for what was polled");
    FAILS(receive_one(&two[1], 5, piece(&two[1], 0, 100)), 0);
    FAILS(simply_to(&two[1], IBV_QPS_ERR), 0);
    CHECK(readable(channel->fd, 30000), "no event for an error");
    FAILS(ibv_get_cq_event(channel, &of, &cq_context), 0);
    ibv_ack_cq_events(cq, 4);
    destroy_any(&two[0]);
    destroy_any(&two[1]);
    FAILS(ibv_destroy_comp_channel(channel), 0);
}

#define MESSAGES 3000

static void *send_all(void *argument)
{
    struct any *from = argument;
    struct ibv_sge sge = piece(from, 0, 100);
    for (int i = 0; i < MESSAGES; i++) {
        FAILS(post_one(from, &sge, (struct ibv_send_wr){.opcode = IBV_WR_SEND}), 0);
        CHECK(next_wc(from->send_cq).status == IBV_WC_SUCCESS, "send %d", i);
    }
    return NULL;
}

/* Arm, poll, sleep: no completion is missed, whenever it comes. */
static void races(void)
{
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    CHECK(channel, "create_comp_channel: %s", strerror(errno));
    struct ibv_cq *cq = ibv_create_cq(context, 128, NULL, channel, 0), *of;
    void *unused;
    struct any two[2];
    make_two_on(two, cq);
    for (int i = 0; i < 32; i++)
        FAILS(receive_one(&two[1], i, piece(&two[1], 0, 100)), 0);
    FAILS(ibv_req_notify_cq(cq, 0), 0);
    pthread_t thread;
    FAILS(pthread_create(&thread, NULL, send_all, &two[0]), 0);
    int received = 0, events = 0;
    while (received < MESSAGES) {
        CHECK(readable(channel->fd, 30000), "no event after %d messages", received);
        FAILS(ibv_get_cq_event(channel, &of, &unused), 0);
        events++;
        FAILS(ibv_req_notify_cq(cq, 0), 0);
        struct ibv_wc wc;
        while (ibv_poll_cq(cq, 1, &wc) == 1) {
            CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)received % 32, "receive %d: %s", received, ibv_wc_status_str(wc.status));
            FAILS(receive_one(&two[1], wc.wr_id, piece(&two[1], 0, 100)), 0);
            received++;
        }
    }
    FAILS(pthread_join(thread, NULL), 0);
    while (readable(channel->fd, 0)) {
        FAILS(ibv_get_cq_event(channel, &of, &unused), 0);
        events++;
    }
    CHECK(events <= MESSAGES, "%d events for %d messages", events, MESSAGES);
    ibv_ack_cq_events(cq, events);
    destroy_any(&two[0]);
    destroy_any(&two[1]);
    FAILS(ibv_destroy_comp_channel(channel), 0);
}

static void resize(void)
{
    struct ibv_device_attr most;
    FAILS(ibv_query_device(context, &most), 0);
    struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, NULL, 0);
    CHECK(cq && cq->cqe >= 8, "create_cq: %s", strerror(errno));
    struct any two[2];
    make_two_on(two, cq);
    for (int i = 0; i < 6; i++)
        message(two, i, 0);
    FAILS(ibv_resize_cq(cq, 0), EINVAL);
    FAILS(ibv_resize_cq(cq, -1), EINVAL);
    FAILS(ibv_resize_cq(cq, most.max_cqe + 1), EINVAL);
    FAILS(ibv_resize_cq(cq, 5), EINVAL); /* six wait */
    CHECK(cq->cqe >= 8, "a resize that failed changes the size");
    CHECK(next_wc(cq).wr_id == 0, "the first");
    FAILS(ibv_resize_cq(cq, 5), 0);
    CHECK(cq->cqe >= 5, "cqe %d", cq->cqe);
    FAILS(ibv_resize_cq(cq, 100), 0);
    CHECK(cq->cqe >= 100, "cqe %d", cq->cqe);
    for (int i = 6; i < 60; i++)
        message(two, i, 0);
    for (uint64_t i = 1; i < 60; i++)
        CHECK(next_wc(cq).wr_id == i, "the completion of %d", (int)i);
    FAILS(ibv_resize_cq(cq, most.max_cqe), 0);
    destroy_any(&two[0]);
    destroy_any(&two[1]);
}

/* A QP with one size that is too large, or as large as it may be. */
#define QP_OF(field, value, wanted) do { \
    struct ibv_qp_init_attr init_ = {.send_cq = any.send_cq, .recv_cq = any.recv_cq, .qp_type = IBV_QPT_RC, \
        .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}}; \
    init_.cap.field = (value); \
    if (wanted) { \
        MAKES_NOTHING(ibv_create_qp(pd, &init_), wanted); \
    } else { \
        struct ibv_qp *qp_ = ibv_create_qp(pd, &init_); \
        CHECK(qp_, #field " %lld: %s", (long long)(value), strerror(errno)); \
        CHECK((long long)init_.cap.field >= (long long)(value), #field " of %u is granted", init_.cap.field); \
        FAILS(ibv_destroy_qp(qp_), 0); \
    } \
} while (0)

static void limits(void)
{
    struct ibv_device_attr most;
    FAILS(ibv_query_device(context, &most), 0);
    struct any any = make_any(context, pd, IBV_QPT_RC);
    QP_OF(max_send_wr, most.max_qp_wr, 0);
    QP_OF(max_recv_wr, most.max_qp_wr, 0);
    QP_OF(max_send_sge, most.max_sge, 0);
    QP_OF(max_recv_sge, most.max_sge, 0);
    QP_OF(max_inline_data, 1024, 0);
    QP_OF(max_send_wr, 0, 0);
    QP_OF(max_recv_wr, 0, 0);
    QP_OF(max_send_sge, 0, 0);
    QP_OF(max_send_wr, most.max_qp_wr + 1, EINVAL);
    QP_OF(max_recv_wr, most.max_qp_wr + 1, EINVAL);
    QP_OF(max_send_sge, most.max_sge + 1, EINVAL);
    QP_OF(max_recv_sge, most.max_sge + 1, EINVAL);
    QP_OF(max_inline_data, 1 << 20, EINVAL);
    QP_OF(max_send_wr, 0xffffffff, EINVAL);
    struct ibv_srq_init_attr srq = {.attr = {.max_wr = most.max_srq_wr + 1, .max_sge = 1}};
    MAKES_NOTHING(ibv_create_srq(pd, &srq), EINVAL);
    srq.attr.max_wr = 1, srq.attr.max_sge = most.max_srq_sge + 1;
    MAKES_NOTHING(ibv_create_srq(pd, &srq), EINVAL);
    srq.attr.max_wr = 0, srq.attr.max_sge = 1;
    MAKES_NOTHING(ibv_create_srq(pd, &srq), EINVAL);
    srq.attr.max_wr = most.max_srq_wr, srq.attr.max_sge = 1;
    struct ibv_srq *large = ibv_create_srq(pd, &srq);
    CHECK(large && srq.attr.max_wr >= (uint32_t)most.max_srq_wr, "create_srq: %s", strerror(errno));
    FAILS(ibv_destroy_srq(large), 0);
    MAKES_NOTHING(ibv_create_cq(context, most.max_cqe + 1, NULL, NULL, 0), EINVAL);
    for (int vector = 0; vector < context->num_comp_vectors; vector++) {
        struct ibv_cq *cq = ibv_create_cq(context, 1, NULL, NULL, vector);
        CHECK(cq, "comp_vector %d: %s", vector, strerror(errno));
        FAILS(ibv_destroy_cq(cq), 0);
    }
    MAKES_NOTHING(ibv_create_cq(context, 1, NULL, NULL, -1), EINVAL);
    /* No memory. */
    unsigned long pages;
    FILE *statm = fopen("/proc/self/statm", "r");
    CHECK(statm && fscanf(statm, "%lu", &pages) == 1, "statm");
    fclose(statm);
    struct rlimit before, tight;
    FAILS(getrlimit(RLIMIT_AS, &before), 0);
    tight = before, tight.rlim_cur = pages * sysconf(_SC_PAGESIZE) + (8 << 20);
    FAILS(setrlimit(RLIMIT_AS, &tight), 0);
    MAKES_NOTHING(ibv_create_cq(context, most.max_cqe, NULL, NULL, 0), ENOMEM);
    srq.attr.max_wr = most.max_srq_wr, srq.attr.max_sge = 1;
    MAKES_NOTHING(ibv_create_srq(pd, &srq), ENOMEM);
    struct ibv_qp_init_attr large_qp = {.send_cq = any.send_cq, .recv_cq = any.recv_cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = most.max_qp_wr, .max_send_sge = most.max_sge}};
    MAKES_NOTHING(ibv_create_qp(pd, &large_qp), ENOMEM);
    FAILS(setrlimit(RLIMIT_AS, &before), 0);
    struct ibv_qp *qp = ibv_create_qp(pd, &large_qp);
    CHECK(qp, "create_qp: %s", strerror(errno));
    FAILS(ibv_destroy_qp(qp), 0);
    /* Too many entries, and too many requests. */
    struct ibv_sge sges[3] = {{0}};
    struct ibv_recv_wr *bad, receive = {.sg_list = sges, .num_sge = 3};
    take_to(&any, IBV_QPS_RTS, good_attr(context, any.qp->qp_num));
    FAILS(ibv_post_recv(any.qp, &receive, &bad), EINVAL);
    struct ibv_send_wr *bad_send, send = {.opcode = IBV_WR_SEND, .sg_list = sges, .num_sge = 3};
    FAILS(ibv_post_send(any.qp, &send, &bad_send), EINVAL);
    struct ibv_qp_attr now;
    struct ibv_qp_init_attr made;
    FAILS(ibv_query_qp(any.qp, &now, IBV_QP_CAP, &made), 0);
    receive.num_sge = 0;
    for (uint32_t i = 0; i < made.cap.max_recv_wr; i++)
        FAILS(ibv_post_recv(any.qp, &receive, &bad), 0);
    FAILS(ibv_post_recv(any.qp, &receive, &bad), ENOMEM);
    FAILS(simply_to(&any, IBV_QPS_SQD), 0);
    send.num_sge = 0;
    for (uint32_t i = 0; i < made.cap.max_send_wr; i++)
        FAILS(ibv_post_send(any.qp, &send, &bad_send), 0);
    FAILS(ibv_post_send(any.qp, &send, &bad_send), ENOMEM);
    destroy_any(&any);
}

/* Requests are outstanding until their completions are polled: a program that posts as long as it can does not overrun a
 * CQ of the size of its queue. */
static void outstanding(void)
{
    struct any two[2];
    make_two(two, context, pd, IBV_QPT_RC);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr made;
    FAILS(ibv_query_qp(two[0].qp, &attr, IBV_QP_CAP, &made), 0);
    struct ibv_sge sge = piece(&two[0], 0, 8);
    struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE,
        .wr.rdma = {.remote_addr = (uintptr_t)two[1].buffer, .rkey = two[1].mr->rkey}};
    for (uint32_t i = 0; i < made.cap.max_send_wr; i++)
        FAILS(post_one(&two[0], &sge, wr), 0);
    /* The second QP's CQ is empty: polling it carries the writes out. */
    struct ibv_wc wc;
    for (int i = 0; i < 1000; i++)
        CHECK(ibv_poll_cq(two[1].recv_cq, 1, &wc) == 0, "a completion of a plain write");
    FAILS(post_one(&two[0], &sge, wr), ENOMEM);
    for (uint32_t i = 0; i < 3 * made.cap.max_send_wr; i++) {
        CHECK(next_wc(two[0].send_cq).status == IBV_WC_SUCCESS, "write %u", i);
        FAILS(post_one(&two[0], &sge, wr), 0);
    }
    for (uint32_t i = 0; i < made.cap.max_send_wr; i++)
        CHECK(next_wc(two[0].send_cq).status == IBV_WC_SUCCESS, "write %u", i);
    /* Receives that flushed. */
    FAILS(simply_to(&two[0], IBV_QPS_ERR), 0);
    for (uint32_t i = 0; i < made.cap.max_recv_wr; i++)
        FAILS(receive_one(&two[0], i, sge), 0);
    FAILS(receive_one(&two[0], 99, sge), ENOMEM);
    CHECK(next_wc(two[0].recv_cq).wr_id == 0, "the first");
    FAILS(receive_one(&two[0], 99, sge), 0);
    CHECK(!readable(context->async_fd, 0), "an event");
    destroy_any(&two[0]);
    destroy_any(&two[1]);
}

/* What is used by something else stays, and what is of another context is not found. */
static void busy(void)
{
    struct ibv_context *other = open_device();
    struct ibv_pd *mine = ibv_alloc_pd(context), *others = ibv_alloc_pd(other);
    CHECK(mine && others, "alloc_pd: %s", strerror(errno));
    struct any any = make_any(context, mine, IBV_QPT_RC);
    struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_qp_init_attr init = {.send_cq = any.send_cq, .recv_cq = any.recv_cq, .qp_type = IBV_QPT_RC};

    FAILS(ibv_dealloc_pd(mine), EBUSY); /* a QP and an MR */
    FAILS(ibv_destroy_cq(any.send_cq), EBUSY);
    FAILS(ibv_destroy_cq(any.recv_cq), EBUSY);
    errno = 0;
    FAILS(ibv_rereg_mr(any.mr, IBV_REREG_MR_CHANGE_PD, others, NULL, 0, 0), IBV_REREG_MR_ERR_CMD);
    CHECK(errno == EINVAL, "rereg_mr into the PD of another context sets %s", strerror(errno));
    FAILS(ibv_destroy_qp(any.qp), 0);
    FAILS(ibv_dealloc_pd(mine), EBUSY); /* the MR */
    FAILS(ibv_dereg_mr(any.mr), 0);
    any.srq = ibv_create_srq(mine, &srq_init);
    CHECK(any.srq, "create_srq: %s", strerror(errno));
    FAILS(ibv_dealloc_pd(mine), EBUSY); /* the SRQ */
    init.srq = any.srq;
    any.qp = ibv_create_qp(mine, &init);
    CHECK(any.qp, "create_qp: %s", strerror(errno));
    FAILS(ibv_destroy_srq(any.srq), EBUSY);
    FAILS(ibv_destroy_qp(any.qp), 0);

    /* Objects of the other context. */
    struct ibv_td *others_td = ibv_alloc_td(other, &(struct ibv_td_init_attr){0});
    struct ibv_dm *others_dm = ibv_alloc_dm(other, &(struct ibv_alloc_dm_attr){.length = 4096});
    CHECK(others_td && others_dm, "alloc_td or alloc_dm: %s", strerror(errno));
    MAKES_NOTHING(ibv_alloc_parent_domain(context, &(struct ibv_parent_domain_init_attr){.pd = others}), EINVAL);
    MAKES_NOTHING(ibv_alloc_parent_domain(context, &(struct ibv_parent_domain_init_attr){.pd = mine, .td = others_td}), EINVAL);
    MAKES_NOTHING(ibv_reg_dm_mr(mine, others_dm, 0, 4096, IBV_ACCESS_ZERO_BASED), EINVAL);
    FAILS(ibv_free_dm(others_dm), 0);
    FAILS(ibv_dealloc_td(others_td), 0);
    struct ibv_cq *others_cq = ibv_create_cq(other, 4, NULL, NULL, 0);
    struct ibv_srq *others_srq = ibv_create_srq(others, &srq_init);
    CHECK(others_cq && others_srq, "create_cq or create_srq: %s", strerror(errno));
    init.srq = NULL, init.send_cq = others_cq;
    MAKES_NOTHING(ibv_create_qp(mine, &init), EINVAL);
    init.send_cq = any.send_cq, init.recv_cq = others_cq;
    MAKES_NOTHING(ibv_create_qp(mine, &init), EINVAL);
    init.recv_cq = any.recv_cq, init.srq = others_srq;
    MAKES_NOTHING(ibv_create_qp(mine, &init), EINVAL);
    struct ibv_qp_init_attr_ex init_ex = {.send_cq = any.send_cq, .recv_cq = any.recv_cq, .qp_type = IBV_QPT_RC, .pd = others,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS};
    MAKES_NOTHING(ibv_create_qp_ex(context, &init_ex), EINVAL);
    struct ibv_xrcd_init_attr domain = {.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT};
    struct ibv_xrcd *others_xrcd = ibv_open_xrcd(other, &domain);
    CHECK(others_xrcd, "open_xrcd: %s", strerror(errno));
    struct ibv_srq_init_attr_ex srq_ex = {.attr = srq_init.attr, .srq_type = IBV_SRQT_XRC, .pd = mine, .cq = any.recv_cq,
        .xrcd = others_xrcd, .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD |
            IBV_SRQ_INIT_ATTR_CQ};
    MAKES_NOTHING(ibv_create_srq_ex(context, &srq_ex), EINVAL);
    struct ibv_qp_init_attr_ex target = {.qp_type = IBV_QPT_XRC_RECV, .xrcd = others_xrcd, .comp_mask = IBV_QP_INIT_ATTR_XRCD};
    MAKES_NOTHING(ibv_create_qp_ex(context, &target), EINVAL);
    struct ibv_qp *others_target = ibv_create_qp_ex(other, &target);
    CHECK(others_target, "create_qp: %s", strerror(errno));
    struct ibv_qp_open_attr opening = {.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
        .qp_num = others_target->qp_num, .xrcd = others_xrcd, .qp_type = IBV_QPT_XRC_RECV};
    MAKES_NOTHING(ibv_open_qp(context, &opening), EINVAL);
    FAILS(ibv_destroy_qp(others_target), 0);
    FAILS(ibv_close_xrcd(others_xrcd), 0);
    FAILS(ibv_destroy_srq(others_srq), 0);
    FAILS(ibv_destroy_cq(others_cq), 0);
    FAILS(ibv_dealloc_pd(others), 0);

    FAILS(ibv_destroy_srq(any.srq), 0);
    FAILS(ibv_destroy_cq(any.send_cq), 0);
    FAILS(ibv_destroy_cq(any.recv_cq), 0);
    struct ibv_ah *ah = handle_to(mine, good_attr(context, 0));
    FAILS(ibv_dealloc_pd(mine), EBUSY); /* the address handle */
    FAILS(ibv_destroy_ah(ah), 0);
    FAILS(ibv_dealloc_pd(mine), 0);
    FAILS(ibv_close_device(other), 0);
}

/* What the device says of itself, and that it refuses the rest. */
static void device(void)
{
    struct ibv_device_attr attr;
    struct ibv_device_attr_ex ex;
    FAILS(ibv_query_device(context, &attr), 0);
    FAILS(ibv_query_device_ex(context, NULL, &ex), 0);
    CHECK(attr.max_qp > 0 && attr.max_qp_wr > 0 && attr.max_sge > 0 && attr.max_cq > 0 && attr.max_cqe > 0 && attr.max_mr > 0 &&
        attr.max_pd > 0 && attr.max_ah > 0 && attr.max_srq > 0 && attr.max_srq_wr > 0 && attr.max_srq_sge > 0, "limits");
    CHECK(attr.max_pkeys == 1 && attr.phys_port_cnt == 1 && attr.max_sge_rd == attr.max_sge, "limits");
    CHECK(attr.max_res_rd_atom >= attr.max_qp_rd_atom && attr.max_qp_rd_atom > 0, "reads");
    CHECK(!attr.max_ee && !attr.max_rdd && !attr.max_raw_ipv6_qp && !attr.max_raw_ethy_qp && !attr.max_fmr, "what does not exist");
    CHECK(attr.device_cap_flags & IBV_DEVICE_SRQ_RESIZE && attr.device_cap_flags & IBV_DEVICE_PORT_ACTIVE_EVENT, "flags");
    CHECK(!(attr.device_cap_flags & (IBV_DEVICE_AUTO_PATH_MIG | IBV_DEVICE_RAW_MULTI | IBV_DEVICE_RESIZE_MAX_WR)), "flags");
    CHECK(!ex.tso_caps.max_tso && !ex.rss_caps.supported_qpts && !ex.max_wq_type_rq && !ex.packet_pacing_caps.qp_rate_limit_max &&
        !ex.raw_packet_caps && !ex.tm_caps.max_num_tags, "what does not exist");
    CHECK(ex.completion_timestamp_mask && ex.hca_core_clock, "clock");
    struct ibv_query_device_ex_input input = {.comp_mask = 1};
    FAILS(ibv_query_device_ex(context, &input, &ex), EINVAL);
    struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK | 1 << 5}, later = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
    FAILS(ibv_query_rt_values_ex(context, &values), 0);
    FAILS(ibv_query_rt_values_ex(context, &later), 0);
    CHECK(values.comp_mask == IBV_VALUES_MASK_RAW_CLOCK, "comp_mask %#x", values.comp_mask);
    CHECK(values.raw_clock.tv_sec * 1000000000ll + values.raw_clock.tv_nsec <= later.raw_clock.tv_sec * 1000000000ll + later.raw_clock.tv_nsec,
        "the clock goes backwards");
    struct ibv_port_attr port;
    FAILS(ibv_query_port(context, 0, &port), EINVAL);
    FAILS(ibv_query_port(context, 1, &port), 0);
    CHECK(port.active_mtu <= port.max_mtu && port.max_msg_sz >= 1 << 30 && port.pkey_tbl_len == 1 && port.lid == 0 && port.sm_lid == 0 &&
        port.phys_state == 5 && port.active_width && port.active_speed && port.flags & IBV_QPF_GRH_REQUIRED, "port");

    struct any any = make_any(context, pd, IBV_QPT_RC);
    struct ibv_ece ece = {.vendor_id = 0x15b3};
    FAILS(ibv_query_ece(any.qp, &ece), EOPNOTSUPP);
    FAILS(ibv_set_ece(any.qp, &ece), EOPNOTSUPP);
    CHECK(ibv_query_qp_data_in_order(any.qp, IBV_WR_RDMA_WRITE, 0) == 0, "data_in_order");
    struct ibv_qp_rate_limit_attr rate = {.rate_limit = 1000};
    FAILS(ibv_modify_qp_rate_limit(any.qp, &rate), EOPNOTSUPP);
    struct ibv_counters_init_attr counters = {0};
    MAKES_NOTHING(ibv_create_counters(context, &counters), EOPNOTSUPP);
    struct ibv_flow_attr flow = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(flow), .port = 1};
    MAKES_NOTHING(ibv_create_flow(any.qp, &flow), EOPNOTSUPP);
    struct ibv_wq_init_attr wq = {.wq_type = IBV_WQT_RQ, .max_wr = 1, .max_sge = 1, .pd = pd, .cq = any.recv_cq};
    MAKES_NOTHING(ibv_create_wq(context, &wq), EOPNOTSUPP);
    struct ibv_rwq_ind_table_init_attr table = {0};
    MAKES_NOTHING(ibv_create_rwq_ind_table(context, &table), EOPNOTSUPP);
    struct ibv_qp_init_attr_ex unknown = {.send_cq = any.send_cq, .recv_cq = any.recv_cq, .qp_type = IBV_QPT_RC, .pd = pd,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS, .create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB};
    MAKES_NOTHING(ibv_create_qp_ex(context, &unknown), EOPNOTSUPP);
    unknown.comp_mask = IBV_QP_INIT_ATTR_PD, unknown.qp_type = IBV_QPT_DRIVER;
    MAKES_NOTHING(ibv_create_qp_ex(context, &unknown), EOPNOTSUPP);
    destroy_any(&any);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"fields", fields}, {"solicited", solicited}, {"races", races}, {"resize", resize}, {"limits", limits}, {"outstanding", outstanding},
        {"busy", busy},
        {"device", device},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof *cases, &context, &pd);
}
