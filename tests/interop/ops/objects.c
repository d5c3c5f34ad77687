/* The device, queue pairs and memory of a case. */
#include "ops.h"
#include <errno.h>
#include <poll.h>

void open_session(struct session *s, const char *device, const struct parameters *parameters)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    for (int i = 0; list && i < count; i++)
        if (!strcmp(ibv_get_device_name(list[i]), device))
            s->context = ibv_open_device(list[i]);
    if (list)
        ibv_free_device_list(list);
    MUST(s->context, "cannot open %s: %s", device, strerror(errno));
    s->gid_index = parameters->gid_index;
    s->mtu = parameters->mtu;
    s->lossy = parameters->lossy;
    s->pd = ibv_alloc_pd(s->context);
    MUST(s->pd, "alloc_pd: %s", strerror(errno));
    MUST(!ibv_query_gid(s->context, 1, s->gid_index, &s->gid), "query_gid: %s", strerror(errno));
    struct area *areas[] = {&s->out, &s->in};
    for (int i = 0; i < 2; i++) {
        areas[i]->bytes = aligned_alloc(4096, AREA);
        areas[i]->model = malloc(AREA);
        MUST(areas[i]->bytes && areas[i]->model, "no memory");
        memset(areas[i]->bytes, BLANK, AREA);
        areas[i]->mr = ibv_reg_mr(s->pd, areas[i]->bytes, AREA, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
            IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND);
        MUST(areas[i]->mr, "reg_mr: %s", strerror(errno));
    }
}

/* Destroys what a case has made: windows first, as rxe waits 50 s with the end of a QP that has one. */
void close_case(struct session *s)
{
    for (int i = 0; i < s->window_count; i++)
        ibv_dealloc_mw(s->windows[i]);
    for (int i = 0; i < s->pair_count; i++) {
        struct pair *pair = &s->pairs[i];
        if (pair->qp)
            ibv_destroy_qp(pair->qp);
        if (pair->srq)
            ibv_destroy_srq(pair->srq);
        if (pair->send_cq)
            ibv_destroy_cq(pair->send_cq);
        if (pair->recv_cq)
            ibv_destroy_cq(pair->recv_cq);
        if (pair->channel)
            ibv_destroy_comp_channel(pair->channel);
    }
    for (int i = 0; i < s->region_count; i++)
        ibv_dereg_mr(s->regions[i]);
    s->pair_count = s->window_count = s->region_count = 0;
}

/* On a network that loses packets timeouts are waited for; on any other they only mean that somebody is slow. */
struct options defaults(const struct session *s, enum ibv_qp_type type)
{
    bool rc = type == IBV_QPT_RC;
    return (struct options){
        .type = type, .rd_atomic = 4, .dest_rd_atomic = 16, .timeout = s->lossy ? 13 : 17,
        .retry = s->lossy ? 7 : 6, /* rxe takes 7 for ever, and needs it: it counts each sequence NAK as a retry, progress or not */
        .rnr_retry = 7, .min_rnr_timer = 12,
        .access = IBV_ACCESS_REMOTE_WRITE | (rc ? IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC : 0),
    };
}

static enum ibv_mtu mtu_code(int bytes)
{
    return bytes == 256 ? IBV_MTU_256 : bytes == 512 ? IBV_MTU_512 : bytes == 1024 ? IBV_MTU_1024 : bytes == 2048 ? IBV_MTU_2048 : IBV_MTU_4096;
}

/* Takes a queue pair in RESET to RTS, towards the peer's. */
void connect_pair(struct session *s, struct pair *pair)
{
    const struct options *o = &pair->options;
    bool ud = o->type == IBV_QPT_UD, rc = o->type == IBV_QPT_RC;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY, .qp_access_flags = (unsigned)o->access};
    int rc1 = ibv_modify_qp(pair->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
    MUST(!rc1, "to INIT: %s", strerror(rc1));
    /* Half of the cases come by the end of the PSNs. */
    pair->psn = s->number % 2 ? 0xfffff8 : (s->number * 0x11111 + (uint32_t)pair->qp->qp_num) & 0xffffff;
    struct remote mine = {.gid = s->gid, .qpn = pair->qp->qp_num, .psn = pair->psn, .rkey = s->in.mr->rkey, .addr = (uintptr_t)s->in.bytes};
    swap(s, &mine, &pair->remote, sizeof mine);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = mtu_code(s->mtu), .dest_qp_num = pair->remote.qpn,
        .rq_psn = pair->remote.psn, .max_dest_rd_atomic = (uint8_t)o->dest_rd_atomic, .min_rnr_timer = (uint8_t)o->min_rnr_timer,
        .ah_attr = {.is_global = 1, .port_num = 1,
            .grh = {.dgid = pair->remote.gid, .sgid_index = (uint8_t)s->gid_index, .hop_limit = 64}}};
    rc1 = ibv_modify_qp(pair->qp, &attr, ud ? IBV_QP_STATE : IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
        IBV_QP_RQ_PSN | (rc ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0));
    MUST(!rc1, "to RTR: %s", strerror(rc1));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .sq_psn = pair->psn, .timeout = (uint8_t)o->timeout,
        .retry_cnt = (uint8_t)o->retry, .rnr_retry = (uint8_t)o->rnr_retry, .max_rd_atomic = (uint8_t)o->rd_atomic};
    rc1 = ibv_modify_qp(pair->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | (rc ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
        IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0));
    MUST(!rc1, "to RTS: %s", strerror(rc1));
    sync_peer(s);
}

/* A queue pair, connected to the one that the peer makes. */
struct pair *make_pair(struct session *s, const struct options *options)
{
    MUST(s->pair_count < (int)(sizeof s->pairs / sizeof *s->pairs), "too many pairs");
    struct pair *pair = &s->pairs[s->pair_count++];
    *pair = (struct pair){.options = *options};
    if (options->notified) {
        pair->channel = ibv_create_comp_channel(s->context);
        MUST(pair->channel, "create_comp_channel: %s", strerror(errno));
    }
    pair->send_cq = ibv_create_cq(s->context, MOST + DEPTH, NULL, NULL, 0);
    pair->recv_cq = ibv_create_cq(s->context, MOST + DEPTH, NULL, pair->channel, 0);
    MUST(pair->send_cq && pair->recv_cq, "create_cq: %s", strerror(errno));
    if (options->shared) {
        struct ibv_srq_init_attr init = {.attr = {.max_wr = MOST, .max_sge = SGES}};
        pair->srq = ibv_create_srq(s->pd, &init);
        MUST(pair->srq, "create_srq: %s", strerror(errno));
    }
    struct ibv_qp_init_attr init = {.send_cq = pair->send_cq, .recv_cq = pair->recv_cq, .srq = pair->srq, .qp_type = options->type,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = MOST, .max_send_sge = SGES, .max_recv_sge = SGES, .max_inline_data = INLINE}};
    pair->qp = ibv_create_qp(s->pd, &init);
    MUST(pair->qp, "create_qp: %s", strerror(errno));
    connect_pair(s, pair);
    return pair;
}

struct ibv_mr *register_memory(struct session *s, void *addr, size_t length, int access)
{
    struct ibv_mr *mr = ibv_reg_mr(s->pd, addr, length, access);
    MUST(mr, "reg_mr: %s", strerror(errno));
    return s->regions[s->region_count++] = mr;
}

/* A type 2 window, bound by a work request. */
struct ibv_mw *bind_window(struct session *s, struct pair *pair, struct ibv_mr *mr, uint64_t offset, uint64_t length, int access)
{
    struct ibv_mw *mw = ibv_alloc_mw(s->pd, IBV_MW_TYPE_2);
    if (!mw && errno == EOPNOTSUPP)
        skip(s, "the device has no memory windows");
    MUST(mw, "alloc_mw: %s", strerror(errno));
    s->windows[s->window_count++] = mw;
    struct ibv_send_wr wr = {.wr_id = 0xb1d, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
        .bind_mw = {.mw = mw, .rkey = ibv_inc_rkey(mw->rkey),
            .bind_info = {.mr = mr, .addr = (uintptr_t)mr->addr + offset, .length = length, .mw_access_flags = (unsigned)access}}};
    post(s, pair, &wr);
    expect(s, pair, pair->send_cq, &(struct expected){.wr_id = 0xb1d, .opcode = IBV_WC_BIND_MW, .length = ANY});
    mw->rkey = wr.bind_mw.rkey;
    return mw;
}

enum ibv_qp_state state_of(struct session *s, struct ibv_qp *qp)
{
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    int rc = ibv_query_qp(qp, &attr, IBV_QP_STATE, &init);
    MUST(!rc, "query_qp: %s", strerror(rc));
    return attr.qp_state;
}

/* The next asynchronous event, acknowledged; -1 when none comes in that time. */
int next_event(struct session *s, int milliseconds)
{
    struct pollfd fd = {.fd = s->context->async_fd, .events = POLLIN};
    struct ibv_async_event event;
    if (poll(&fd, 1, milliseconds) != 1)
        return -1;
    MUST(!ibv_get_async_event(s->context, &event), "get_async_event: %s", strerror(errno));
    ibv_ack_async_event(&event);
    return (int)event.event_type;
}
