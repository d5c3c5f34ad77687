/* Memory windows, and what invalidates them. */
#include "ops.h"
#include <errno.h>

static struct flow flow;

/* Peers reach memory through a window: what it covers, with the rights it gives. */
static void window(struct session *s)
{
    struct options options = defaults(s, IBV_QPT_RC);
    struct pair *pair = make_pair(s, &options);
    uint32_t key = 0, theirs = 0;
    if (!s->requester)
        key = bind_window(s, pair, s->in.mr, 0, AREA, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)->rkey;
    swap(s, &key, &theirs, sizeof key);
    pair->remote.rkey = theirs;
    flow.count = 0;
    for (int i = 0; i < 20; i++)
        add(s, &flow, i % 4 == 0 ? IBV_WR_RDMA_WRITE : i % 4 == 1 ? IBV_WR_RDMA_READ : i % 4 == 2 ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_ATOMIC_FETCH_AND_ADD,
            (uint32_t)(i * 733));
    run_flow(s, pair, &flow);
}

/* Each SEND takes a window away from the peer, which is told which. */
static void send_inv(struct session *s)
{
    enum { WINDOWS = 4 };
    struct options options = defaults(s, IBV_QPT_RC);
    struct pair *pair = make_pair(s, &options);
    uint32_t mine[WINDOWS] = {0}, keys[WINDOWS];
    if (!s->requester)
        for (int i = 0; i < WINDOWS; i++)
            mine[i] = bind_window(s, pair, s->in.mr, 0, 1 << 20, IBV_ACCESS_REMOTE_WRITE)->rkey;
    swap(s, mine, keys, sizeof mine);
    flow.count = 0;
    for (int i = 0; i < WINDOWS; i++) {
        add(s, &flow, IBV_WR_SEND_WITH_INV, (uint32_t)(i * s->mtu));
        flow.messages[i].invalidate = s->requester ? keys[i] : mine[i];
    }
    run_flow(s, pair, &flow);
    /* And it is gone. Where packets are lost this can't be asked: a refusal is not given again, and rxe asks for ever. */
    if (s->requester && !s->lossy) {
        struct ibv_sge from = entry(&s->out, 0, 64);
        struct ibv_send_wr wr = {.wr_id = 5, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
            .wr.rdma = {.remote_addr = pair->remote.addr, .rkey = keys[1]}};
        post(s, pair, &wr);
        expect_status(s, pair, pair->send_cq, 5, IBV_WC_REM_ACCESS_ERR);
    }
    sync_peer(s);
}

/* A SEND that names a key which is none. rxe acknowledges it all the same. */
static void send_inv_bad(struct session *s)
{
    struct options options = defaults(s, IBV_QPT_RC);
    struct pair *pair = make_pair(s, &options);
    struct ibv_sge place = entry(&s->in, 0, 64), from = entry(&s->out, 0, 64);
    if (!s->requester)
        post_receive(s, pair, 3, &place, 1);
    sync_peer(s);
    if (s->requester) {
        struct ibv_send_wr wr = {.wr_id = 5, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_INV,
            .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = 0x7777};
        post(s, pair, &wr);
        expect_status(s, pair, pair->send_cq, 5, s->peer_rxe ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR);
    } else {
        expect_status(s, pair, pair->recv_cq, 3, IBV_WC_REM_INV_REQ_ERR);
        MUST(state_of(s, pair->qp) == IBV_QPS_ERR, "the responder is in state %d", state_of(s, pair->qp));
    }
    sync_peer(s);
}

/* The owner takes its own window away. */
static void local_inv(struct session *s)
{
    struct options options = defaults(s, IBV_QPT_RC);
    struct pair *pair = make_pair(s, &options);
    uint32_t key = 0, theirs;
    if (!s->requester)
        key = bind_window(s, pair, s->in.mr, 0, 1 << 20, IBV_ACCESS_REMOTE_WRITE)->rkey;
    swap(s, &key, &theirs, sizeof key);
    struct ibv_sge from = entry(&s->out, 0, 64);
    struct ibv_send_wr write = {.wr_id = 1, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {.remote_addr = pair->remote.addr, .rkey = theirs}};
    if (s->requester) {
        post(s, pair, &write);
        expect_status(s, pair, pair->send_cq, 1, IBV_WC_SUCCESS);
    }
    sync_peer(s);
    if (!s->requester) {
        struct ibv_send_wr wr = {.wr_id = 2, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = key};
        post(s, pair, &wr);
        expect(s, pair, pair->send_cq, &(struct expected){.wr_id = 2, .opcode = IBV_WC_LOCAL_INV, .length = ANY});
    }
    sync_peer(s);
    if (s->requester) {
        post(s, pair, &write);
        expect_status(s, pair, pair->send_cq, 1, IBV_WC_REM_ACCESS_ERR);
    }
    sync_peer(s);
}

/* What a window does not allow. rxe holds ranges against the region under the window. */
static void window_limits(struct session *s)
{
    bool rxe = s->requester ? s->peer_rxe : s->rxe;
    for (int i = rxe ? 2 : 0; i < 3; i++) {
        struct options options = defaults(s, IBV_QPT_RC);
        struct pair *pair = make_pair(s, &options);
        uint32_t key = 0, theirs;
        if (!s->requester)
            key = bind_window(s, pair, s->in.mr, 4096, 4096, i == 2 ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE)->rkey;
        swap(s, &key, &theirs, sizeof key);
        if (s->requester) {
            struct ibv_sge from = entry(&s->out, 0, 64);
            struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
                .wr.rdma = {.remote_addr = pair->remote.addr + (i == 0 ? 4090 : i == 1 ? 8190 : 5000), .rkey = theirs}};
            post(s, pair, &wr);
            expect_status(s, pair, pair->send_cq, 1, IBV_WC_REM_ACCESS_ERR);
        }
        sync_peer(s);
    }
}

const struct test window_tests[] = {
    {"rc/window", window}, {"rc/send-inv", send_inv}, {"rc/local-inv", local_inv}, {"error/window-limits", window_limits},
    {"error/send-inv-key", send_inv_bad}, {NULL, NULL},
};
