/* states CASE: every transition of the QP states with every attribute, the values of attributes, and what a query gives. */
#include "verbs_any.h"

static struct ibv_context *context;
static struct ibv_pd *pd;

#define RC 1
#define UC 2
#define UD 4
#define INI 8 /* XRC */
#define TGT 16
#define ALL (RC | UC | UD | INI | TGT)
#define READS (IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)
#define PKEY IBV_QP_PKEY_INDEX
#define ACCESS IBV_QP_ACCESS_FLAGS
#define CUR IBV_QP_CUR_STATE
#define ALT IBV_QP_ALT_PATH
#define MIG IBV_QP_PATH_MIG_STATE
#define RNR IBV_QP_MIN_RNR_TIMER
#define RESET IBV_QPS_RESET
#define INIT IBV_QPS_INIT
#define RTR IBV_QPS_RTR
#define RTS IBV_QPS_RTS
#define SQD IBV_QPS_SQD
#define SQE IBV_QPS_SQE
#define ERR IBV_QPS_ERR

/* The transitions that there are, and what each allows beyond what it needs (Linux, qp_state_table). */
static const struct { enum ibv_qp_state from, to; int types, allows; } transitions[] = {
    {RESET, RESET, ALL, 0}, {RESET, INIT, ALL, 0},
    {INIT, RESET, ALL, 0}, {INIT, ERR, ALL, 0},
    {INIT, INIT, UD, PKEY | IBV_QP_PORT | IBV_QP_QKEY}, {INIT, INIT, ALL & ~UD, PKEY | IBV_QP_PORT | ACCESS},
    {INIT, RTR, UD, PKEY | IBV_QP_QKEY}, {INIT, RTR, ALL & ~UD, ALT | ACCESS | PKEY},
    {RTR, RESET, ALL, 0}, {RTR, ERR, ALL, 0},
    {RTR, RTS, UD, CUR | IBV_QP_QKEY}, {RTR, RTS, UC | INI, CUR | ALT | ACCESS | MIG},
    {RTR, RTS, RC | TGT, CUR | ALT | ACCESS | MIG | RNR},
    {RTS, RESET, ALL, 0}, {RTS, ERR, ALL, 0}, {RTS, SQD, ALL, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {RTS, RTS, UD, CUR | IBV_QP_QKEY}, {RTS, RTS, UC | INI, CUR | ALT | ACCESS | MIG},
    {RTS, RTS, RC | TGT, CUR | ALT | ACCESS | MIG | RNR},
    {SQD, RESET, ALL, 0}, {SQD, ERR, ALL, 0},
    {SQD, RTS, UD, CUR | IBV_QP_QKEY}, {SQD, RTS, UC | INI, CUR | ALT | ACCESS | MIG},
    {SQD, RTS, RC | TGT, CUR | ALT | ACCESS | MIG | RNR},
    {SQD, SQD, UD, PKEY | IBV_QP_QKEY}, {SQD, SQD, UC, IBV_QP_AV | ALT | ACCESS | PKEY | MIG},
    {SQD, SQD, RC, IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | READS | IBV_QP_MAX_DEST_RD_ATOMIC | ALT | ACCESS | PKEY | RNR | MIG},
    {SQD, SQD, INI, IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | READS | ALT | ACCESS | PKEY | MIG},
    {SQD, SQD, TGT, IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_MAX_DEST_RD_ATOMIC | ALT | ACCESS | PKEY | RNR | MIG},
    {SQE, RESET, UC | UD, 0}, {SQE, ERR, UC | UD, 0}, {SQE, RTS, UD, CUR | IBV_QP_QKEY}, {SQE, RTS, UC, CUR | ACCESS},
    {ERR, RESET, ALL, 0}, {ERR, ERR, ALL, 0},
};

/* A queue pair in this state. */
static struct any in_state(enum ibv_qp_type type, enum ibv_qp_state state)
{
    struct any any = make_any(context, pd, type);
    struct ibv_qp_attr attr = good_attr(context, any.qp->qp_num);
    take_to(&any, state < RTS ? state : RTS, attr);
    if (state == SQE) {
        struct ibv_sge sge = piece(&any, 0, 8);
        sge.lkey ^= 1;
        struct ibv_ah *ah = handle_to(pd, attr);
        struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .wr.ud = {.ah = ah, .remote_qpn = any.qp->qp_num, .remote_qkey = QKEY}};
        FAILS(post_one(&any, &sge, wr), 0);
        CHECK(next_wc(any.send_cq).status == IBV_WC_LOC_PROT_ERR, "a wrong lkey is accepted");
        FAILS(ibv_destroy_ah(ah), 0);
    } else if (state > RTS) {
        FAILS(simply_to(&any, state), 0);
    }
    CHECK(state_of(&any) == state, "in state %d, not %d", state_of(&any), state);
    return any;
}

/* Tries one transition; the queue pair is in `from` before and afterwards. */
static void try(struct any *any, enum ibv_qp_state from, enum ibv_qp_state to, int mask, int wanted)
{
    struct ibv_qp_attr attr = good_attr(context, any->qp->qp_num);
    attr.qp_state = to;
    attr.cur_qp_state = from;
    int rc = ibv_modify_qp(any->qp, &attr, mask);
    CHECK(rc == wanted, "type %d from state %d to %d, mask %#x: %d, not %d", any->type, from, to, mask, rc, wanted);
    enum ibv_qp_state now = state_of(any), then = rc ? from : to;
    CHECK(now == then, "type %d from state %d to %d, mask %#x: now in state %d", any->type, from, to, mask, now);
    if (!rc) {
        destroy_any(any);
        *any = in_state(any->type, from);
    }
}

static void transition(enum ibv_qp_type type, enum ibv_qp_state from)
{
    int bit = type == IBV_QPT_RC ? RC : type == IBV_QPT_UC ? UC : type == IBV_QPT_UD ? UD : type == IBV_QPT_XRC_SEND ? INI : TGT;
    /* What an XRC QP has no use for is not looked at, as programs name it nevertheless. */
    int ignored = bit == INI ? IBV_QP_MAX_DEST_RD_ATOMIC | RNR : bit == TGT ? READS : 0;
    struct any any = in_state(type, from);
    for (enum ibv_qp_state to = RESET; to <= ERR; to++) {
        int exists = 0, allows = 0, needed = needs(type, from, to);
        for (size_t i = 0; i < sizeof(transitions) / sizeof(transitions[0]); i++)
            if (transitions[i].from == from && transitions[i].to == to && transitions[i].types & bit)
                exists = 1, allows = transitions[i].allows;
        int full = IBV_QP_STATE | needed;
        try(&any, from, to, full, exists ? 0 : EINVAL);
        if (from == to)
            try(&any, from, to, needed, exists ? 0 : EINVAL); /* the state need not be named */
        for (int shift = 1; shift <= 30; shift++) {
            int attribute = 1 << shift;
            if (needed & attribute)
                try(&any, from, to, full & ~attribute, EINVAL);
            else /* RoCE has no alternate paths */
                try(&any, from, to, full | attribute,
                    exists && (allows | ignored) & attribute && attribute != ALT ? 0 : EINVAL);
        }
    }
    destroy_any(&any);
}

static void transitions_of(enum ibv_qp_type type)
{
    for (enum ibv_qp_state from = RESET; from <= ERR; from++)
        if (from != SQE || type == IBV_QPT_UC || type == IBV_QPT_UD)
            transition(type, from);
}

static void rc(void) { transitions_of(IBV_QPT_RC); }
static void uc(void) { transitions_of(IBV_QPT_UC); }
static void ud(void) { transitions_of(IBV_QPT_UD); }
static void initiator(void) { transitions_of(IBV_QPT_XRC_SEND); }
static void target(void) { transitions_of(IBV_QPT_XRC_RECV); }

/* One attribute with a wrong value, in a transition that takes it. */
#define WRONG(state, bit, change) do { \
    struct any any_ = in_state(IBV_QPT_RC, (state)); \
    struct ibv_qp_attr attr = good_attr(context, any_.qp->qp_num); \
    enum ibv_qp_state to_ = (state) == RTS ? RTS : (state) + 1; \
    attr.qp_state = to_; \
    change; \
    FAILS(ibv_modify_qp(any_.qp, &attr, IBV_QP_STATE | needs(IBV_QPT_RC, (state), to_) | (bit)), EINVAL); \
    CHECK(state_of(&any_) == (state), "in another state after " #change); \
    destroy_any(&any_); \
} while (0)

static void values(void)
{
    struct ibv_port_attr port;
    struct ibv_device_attr most;
    FAILS(ibv_query_port(context, 1, &port), 0);
    FAILS(ibv_query_device(context, &most), 0);
    WRONG(RESET, IBV_QP_PORT, attr.port_num = 0);
    WRONG(RESET, IBV_QP_PORT, attr.port_num = 2);
    WRONG(RESET, PKEY, attr.pkey_index = 1);
    WRONG(INIT, IBV_QP_AV, attr.ah_attr.is_global = 0);
    WRONG(INIT, IBV_QP_AV, attr.ah_attr.port_num = 2);
    WRONG(INIT, IBV_QP_AV, attr.ah_attr.port_num = 0);
    WRONG(INIT, IBV_QP_AV, attr.ah_attr.grh.sgid_index = 255);
    WRONG(INIT, IBV_QP_AV, memset(&attr.ah_attr.grh.dgid, 0, 16));
    WRONG(INIT, IBV_QP_PATH_MTU, attr.path_mtu = 0);
    WRONG(INIT, IBV_QP_PATH_MTU, attr.path_mtu = 6);
    if (port.active_mtu < IBV_MTU_4096)
        WRONG(INIT, IBV_QP_PATH_MTU, attr.path_mtu = port.active_mtu + 1);
    WRONG(INIT, IBV_QP_MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic = most.max_qp_rd_atom + 1);
    WRONG(INIT, RNR, attr.min_rnr_timer = 32);
    WRONG(RTR, IBV_QP_TIMEOUT, attr.timeout = 32);
    WRONG(RTR, IBV_QP_RETRY_CNT, attr.retry_cnt = 8);
    WRONG(RTR, IBV_QP_RNR_RETRY, attr.rnr_retry = 8);
    WRONG(RTR, IBV_QP_MAX_QP_RD_ATOMIC, attr.max_rd_atomic = most.max_qp_init_rd_atom + 1);
    WRONG(RTR, CUR, attr.cur_qp_state = RTS);
    WRONG(RTS, CUR, attr.cur_qp_state = SQD);
    WRONG(RTS, CUR, attr.cur_qp_state = 9);
    WRONG(RTS, MIG, attr.path_mig_state = IBV_MIG_REARM);
    WRONG(RTS, MIG, attr.path_mig_state = 3);
    WRONG(RTS, ALT, attr.alt_ah_attr = attr.ah_attr);
    WRONG(RTS, 0, attr.qp_state = 7);
    WRONG(RTS, 0, attr.qp_state = IBV_QPS_UNKNOWN);
    WRONG(RTS, 1 << 25, attr.rate_limit = 100);
}

static void query(void)
{
    struct any any = make_any(context, pd, IBV_QPT_RC);
    struct ibv_qp_attr set = good_attr(context, 0xabcdef), now;
    struct ibv_qp_init_attr made;
    set.ah_attr.grh.traffic_class = 0x28, set.ah_attr.grh.flow_label = 0x12345, set.ah_attr.sl = 3;
    set.max_rd_atomic = 3, set.max_dest_rd_atomic = 5, set.timeout = 17, set.retry_cnt = 6, set.rnr_retry = 5;
    set.rq_psn = 0xff123456, set.sq_psn = 0xff654321, set.min_rnr_timer = 30; /* PSNs have 24 bits */
    FAILS(ibv_query_qp(any.qp, &now, IBV_QP_CAP, &made), 0);
    CHECK(now.qp_state == RESET && now.cap.max_send_wr >= 16 && now.cap.max_recv_sge >= 2, "RESET");
    CHECK(!memcmp(&now.cap, &made.cap, sizeof(now.cap)), "two answers about the sizes");
    take_to(&any, RTS, set);
    memset(&now, 0xff, sizeof(now)), memset(&made, 0xff, sizeof(made));
    FAILS(ibv_query_qp(any.qp, &now, 0, &made), 0);
    CHECK(now.qp_state == RTS && now.cur_qp_state == RTS && any.qp->state == RTS, "state");
    CHECK(now.path_mtu == set.path_mtu && now.path_mig_state == IBV_MIG_MIGRATED, "path");
    CHECK(now.rq_psn == 0x123456 && now.sq_psn == 0x654321 && now.dest_qp_num == 0xabcdef, "%#x %#x", now.rq_psn, now.sq_psn);
    CHECK(now.qp_access_flags == set.qp_access_flags, "access %#x", now.qp_access_flags);
    CHECK(now.ah_attr.is_global == 1 && now.ah_attr.port_num == 1 && now.ah_attr.sl == 3 && now.ah_attr.dlid == 0, "AV");
    CHECK(now.ah_attr.grh.traffic_class == 0x28 && now.ah_attr.grh.flow_label == 0x12345 && now.ah_attr.grh.hop_limit == 3 &&
        now.ah_attr.grh.sgid_index == gid_index() && !memcmp(&now.ah_attr.grh.dgid, &set.ah_attr.grh.dgid, 16), "GRH");
    CHECK(now.pkey_index == 0 && now.alt_port_num == 0 && now.alt_timeout == 0 && now.alt_pkey_index == 0, "no alternate path");
    CHECK(!now.en_sqd_async_notify && !now.sq_draining && now.port_num == 1, "not draining");
    CHECK(now.max_rd_atomic == 3 && now.max_dest_rd_atomic == 5 && now.min_rnr_timer == 30, "reads");
    CHECK(now.timeout == 17 && now.retry_cnt == 6 && now.rnr_retry == 5 && now.rate_limit == 0, "retries");
    CHECK(made.send_cq == any.send_cq && made.recv_cq == any.recv_cq && !made.srq && made.sq_sig_all == 1 &&
        made.qp_type == IBV_QPT_RC && made.qp_context == any.qp->qp_context, "init_attr");
    FAILS(simply_to(&any, RESET), 0);
    FAILS(ibv_query_qp(any.qp, &now, 0, &made), 0);
    CHECK(now.qp_state == RESET && !now.dest_qp_num && !now.timeout && !now.ah_attr.is_global, "something is left");
    destroy_any(&any);

    struct ibv_srq_init_attr init = {.attr = {.max_wr = 10, .max_sge = 2}};
    struct ibv_srq *srq = ibv_create_srq(pd, &init);
    struct ibv_srq_attr srq_attr = {.max_wr = 20, .max_sge = 9, .srq_limit = 7}, srq_now;
    CHECK(srq && init.attr.max_wr >= 10 && init.attr.max_sge >= 2, "create_srq: %s", strerror(errno));
    FAILS(ibv_query_srq(srq, &srq_now), 0);
    CHECK(srq_now.max_wr == init.attr.max_wr && srq_now.max_sge == init.attr.max_sge && !srq_now.srq_limit, "query_srq");
    FAILS(ibv_modify_srq(srq, &srq_attr, 0), 0);
    FAILS(ibv_modify_srq(srq, &srq_attr, 4), EINVAL);
    FAILS(ibv_modify_srq(srq, &srq_attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT), 0);
    FAILS(ibv_query_srq(srq, &srq_now), 0);
    CHECK(srq_now.max_wr >= 20 && srq_now.max_sge == init.attr.max_sge && srq_now.srq_limit == 7, "query_srq after modify_srq");
    srq_attr.max_wr = 6; /* below the limit */
    FAILS(ibv_modify_srq(srq, &srq_attr, IBV_SRQ_MAX_WR), EINVAL);
    srq_attr.srq_limit = srq_now.max_wr + 1;
    FAILS(ibv_modify_srq(srq, &srq_attr, IBV_SRQ_LIMIT), EINVAL);
    srq_attr.srq_limit = 0;
    FAILS(ibv_modify_srq(srq, &srq_attr, IBV_SRQ_LIMIT), 0);
    struct ibv_sge sge = {0};
    struct ibv_recv_wr *bad, wr = {.sg_list = &sge, .num_sge = 1};
    for (int i = 0; i < 10; i++)
        FAILS(ibv_post_srq_recv(srq, &wr, &bad), 0);
    srq_attr.max_wr = 9;
    FAILS(ibv_modify_srq(srq, &srq_attr, IBV_SRQ_MAX_WR), EINVAL);
    srq_attr.max_wr = 0;
    FAILS(ibv_modify_srq(srq, &srq_attr, IBV_SRQ_MAX_WR), EINVAL);
    srq_attr.max_wr = 10;
    FAILS(ibv_modify_srq(srq, &srq_attr, IBV_SRQ_MAX_WR), 0);
    FAILS(ibv_post_srq_recv(srq, &wr, &bad), ENOMEM);
    FAILS(ibv_destroy_srq(srq), 0);
}

/* Draining: what is posted meanwhile waits; ERR and RESET forget. */
static void drain(void)
{
    struct any two[2];
    for (int i = 0; i < 2; i++)
        two[i] = make_any(context, pd, IBV_QPT_RC);
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr attr = good_attr(context, two[!i].qp->qp_num);
        attr.rnr_retry = 7; /* for ever */
        take_to(&two[i], RTS, attr);
    }
    struct ibv_sge sge = piece(&two[0], 0, 64);
    struct ibv_send_wr send = {.wr_id = 1, .opcode = IBV_WR_SEND};
    struct ibv_qp_attr sqd = {.qp_state = SQD, .en_sqd_async_notify = 1}, now;
    struct ibv_qp_init_attr made;
    struct ibv_async_event event;
    /* The peer has no receive: the send is under way until it gets one. */
    FAILS(post_one(&two[0], &sge, send), 0);
    FAILS(ibv_modify_qp(two[0].qp, &sqd, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
    FAILS(ibv_query_qp(two[0].qp, &now, 0, &made), 0);
    CHECK(now.qp_state == SQD && now.sq_draining && now.en_sqd_async_notify, "query_qp");
    FAILS(simply_to(&two[0], RTS), EINVAL);
    FAILS(simply_to(&two[0], SQD), EINVAL);
    CHECK(!readable(context->async_fd, 0), "drained too early");
    FAILS(receive_one(&two[1], 2, piece(&two[1], 0, 64)), 0);
    struct ibv_wc wc = next_wc(two[0].send_cq);
    CHECK(wc.status == IBV_WC_SUCCESS, "%s", ibv_wc_status_str(wc.status));
    event = next_event(context);
    CHECK(event.event_type == IBV_EVENT_SQ_DRAINED && event.element.qp == two[0].qp, "%s", ibv_event_type_str(event.event_type));
    ibv_ack_async_event(&event);
    FAILS(ibv_query_qp(two[0].qp, &now, 0, &made), 0);
    CHECK(now.qp_state == SQD && !now.sq_draining, "query_qp");
    FAILS(receive_one(&two[1], 3, piece(&two[1], 0, 64)), 0);
    FAILS(post_one(&two[0], &sge, send), 0); /* waits for RTS */
    CHECK(ibv_poll_cq(two[0].send_cq, 1, &wc) == 0 && ibv_poll_cq(two[1].recv_cq, 1, &wc) == 1, "SQD sends");
    FAILS(simply_to(&two[0], RTS), 0);
    CHECK(next_wc(two[0].send_cq).status == IBV_WC_SUCCESS, "what was posted in SQD");
    CHECK(next_wc(two[1].recv_cq).wr_id == 3, "what was posted in SQD arrives");
    CHECK(!readable(context->async_fd, 0), "the event comes twice");
    destroy_any(&two[0]);
    destroy_any(&two[1]);
}

/* ERR flushes both queues in order, then at once what is posted; RESET takes completions out of the CQs. */
static void flush(void)
{
    static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};
    for (int t = 0; t < 3; t++) {
        struct any any = in_state(types[t], SQD);
        struct ibv_qp_attr attr = good_attr(context, any.qp->qp_num);
        struct ibv_ah *ah = handle_to(pd, attr);
        struct ibv_sge sge = piece(&any, 0, 8);
        struct ibv_send_wr send = {.opcode = IBV_WR_SEND, .wr.ud = {.ah = ah, .remote_qpn = any.qp->qp_num, .remote_qkey = QKEY}};
        for (int i = 0; i < 6; i++) {
            if (i == 4)
                FAILS(simply_to(&any, ERR), 0);
            send.wr_id = i;
            FAILS(post_one(&any, &sge, send), 0);
            FAILS(receive_one(&any, 10 + i, sge), 0);
        }
        for (int i = 0; i < 6; i++) {
            struct ibv_wc sent = next_wc(any.send_cq), received = next_wc(any.recv_cq);
            CHECK(sent.status == IBV_WC_WR_FLUSH_ERR && received.status == IBV_WC_WR_FLUSH_ERR, "status of %d", i);
            CHECK(sent.wr_id == (uint64_t)i && received.wr_id == (uint64_t)10 + i, "order");
            CHECK(sent.qp_num == any.qp->qp_num && received.qp_num == any.qp->qp_num, "qp_num");
            CHECK(sent.vendor_err && received.vendor_err, "vendor_err");
        }
        FAILS(receive_one(&any, 1, sge), 0);
        FAILS(simply_to(&any, RESET), 0);
        struct ibv_wc wc;
        CHECK(ibv_poll_cq(any.recv_cq, 1, &wc) == 0, "RESET leaves completions behind");
        FAILS(receive_one(&any, 1, sge), EINVAL);
        FAILS(post_one(&any, &sge, send), EINVAL);
        /* And it can be used again, here towards itself. */
        take_to(&any, RTS, attr);
        FAILS(receive_one(&any, 7, piece(&any, 0, 200)), 0);
        send.wr_id = 8;
        FAILS(post_one(&any, &sge, send), 0);
        CHECK(next_wc(any.send_cq).status == IBV_WC_SUCCESS, "send after a reset");
        wc = next_wc(any.recv_cq);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == 7, "receive after a reset: %s", ibv_wc_status_str(wc.status));
        FAILS(ibv_destroy_ah(ah), 0);
        destroy_any(&any);
    }
}

/* SQE: the send queue stands still, the receive queue does not. */
static void send_error(void)
{
    static const enum ibv_qp_type types[] = {IBV_QPT_UC, IBV_QPT_UD};
    for (int t = 0; t < 2; t++) {
        struct any any = in_state(types[t], SQE);
        struct ibv_qp_attr attr = good_attr(context, any.qp->qp_num);
        struct ibv_ah *ah = handle_to(pd, attr);
        struct any other = make_any(context, pd, types[t]);
        take_to(&other, RTS, attr);
        struct ibv_sge sge = piece(&other, 0, 8);
        struct ibv_send_wr send = {.opcode = IBV_WR_SEND, .wr.ud = {.ah = ah, .remote_qpn = any.qp->qp_num, .remote_qkey = QKEY}};
        FAILS(post_one(&any, &sge, send), 0);
        CHECK(next_wc(any.send_cq).status == IBV_WC_WR_FLUSH_ERR, "a send in SQE");
        FAILS(receive_one(&any, 1, piece(&any, 0, 100)), 0);
        FAILS(post_one(&other, &sge, send), 0);
        CHECK(next_wc(any.recv_cq).status == IBV_WC_SUCCESS, "a receive in SQE");
        CHECK(state_of(&any) == SQE, "state");
        FAILS(simply_to(&any, RTS), 0);
        FAILS(receive_one(&any, 1, piece(&any, 0, 100)), 0);
        FAILS(post_one(&any, &sge, send), 0);
        CHECK(next_wc(any.send_cq).status == IBV_WC_SUCCESS && next_wc(any.recv_cq).status == IBV_WC_SUCCESS, "RTS again");
        FAILS(ibv_destroy_ah(ah), 0);
        destroy_any(&any);
        destroy_any(&other);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"rc", rc}, {"uc", uc}, {"ud", ud}, {"initiator", initiator}, {"target", target}, {"values", values}, {"query", query}, {"drain", drain}, {"flush", flush},
        {"send-error", send_error},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof *cases, &context, &pd);
}
