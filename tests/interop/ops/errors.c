/* Cases in which something is wrong: what each side sees of it, and that both go on afterwards. */
#include "ops.h"
#include <errno.h>

static struct flow flow;

static void to_state(struct session *s, struct pair *pair, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = {.qp_state = state};
    int rc = ibv_modify_qp(pair->qp, &attr, IBV_QP_STATE);
    MUST(!rc, "to state %d: %s", state, strerror(rc));
}

/* The same queue pairs, reset and connected again, carry messages. */
static void works_again(struct session *s, struct pair *pair)
{
    pair->options = defaults(s, pair->options.type);
    to_state(s, pair, IBV_QPS_RESET);
    sync_peer(s);
    connect_pair(s, pair);
    flow.count = 0;
    for (int i = 0; i < 8; i++)
        add(s, &flow, i % 2 ? IBV_WR_SEND : IBV_WR_RDMA_READ, (uint32_t)(i * 500));
    run_flow(s, pair, &flow);
}

static struct ibv_send_wr plain(struct pair *pair, uint64_t wr_id, enum ibv_wr_opcode opcode, struct ibv_sge *sge)
{
    struct ibv_send_wr wr = {.wr_id = wr_id, .sg_list = sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED};
    if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
        wr.wr.atomic.remote_addr = pair->remote.addr, wr.wr.atomic.rkey = pair->remote.rkey;
    else
        wr.wr.rdma.remote_addr = pair->remote.addr, wr.wr.rdma.rkey = pair->remote.rkey;
    return wr;
}

/* What is wrong with a request. */
struct wrong {
    enum ibv_wr_opcode opcode;
    uint32_t length;      /* 0: 64 */
    bool key;             /* it names none of the responder's keys */
    int64_t offset;       /* where it goes in a region of 8192 bytes */
    int region;           /* rights of that region; 0: all */
    int rights;           /* of the responder's queue pair; 0: all */
    bool none_accepted;   /* the responder takes no READs and atomics */
    uint32_t receive;     /* bytes of the responder's receives; 0: 64 */
    bool receive_key;     /* the responder's receive names none of its keys */
    enum ibv_wc_status status;
    enum ibv_wc_status receive_status; /* of the receive that is next; 0: flushed */
    int event;            /* at a responder that is not rxe, which has none */
};

/* A good SEND, the wrong request, and two more. The wrong one fails and what follows is flushed, on both sides. */
static void refused(struct session *s, struct wrong wrong)
{
    const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    struct options options = defaults(s, IBV_QPT_RC);
    if (!s->requester && wrong.rights)
        options.access = wrong.rights & ~1;
    if (!s->requester && wrong.none_accepted)
        options.dest_rd_atomic = 0;
    while (next_event(s, 0) >= 0) {} /* of earlier cases */
    struct pair *pair = make_pair(s, &options);
    struct ibv_mr *mr = register_memory(s, s->in.bytes + 4096, 8192, wrong.region ? wrong.region : all);
    struct remote mine = {.addr = (uintptr_t)s->in.bytes + 4096, .rkey = mr->rkey}, theirs;
    swap(s, &mine, &theirs, sizeof mine);
    memset(s->in.bytes, BLANK, 32768);
    uint32_t length = wrong.length ? wrong.length : 64;
    struct ibv_sge first = entry(&s->in, 0, 64), next = entry(&s->in, 64, wrong.receive ? wrong.receive : 64);
    if (wrong.receive_key)
        next.lkey ^= 0x00770000;
    if (!s->requester) {
        post_receive(s, pair, 100, &first, 1);
        post_receive(s, pair, 101, &next, 1);
    }
    sync_peer(s);
    if (s->requester) {
        bool atomic = wrong.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wrong.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
        struct ibv_sge small = entry(&s->out, 0, 10), from = entry(&s->out, 4096, atomic ? 8 : length);
        struct ibv_send_wr wrs[4];
        pair->remote.addr = theirs.addr + (uint64_t)wrong.offset;
        pair->remote.rkey = theirs.rkey ^ (wrong.key ? 0x00770000 : 0);
        for (int i = 0; i < 4; i++) {
            wrs[i] = plain(pair, (uint64_t)i + 1, i == 1 ? wrong.opcode : IBV_WR_SEND, i == 1 ? &from : &small);
            wrs[i].next = i < 3 ? &wrs[i + 1] : NULL;
        }
        post(s, pair, wrs);
        expect_status(s, pair, pair->send_cq, 1, IBV_WC_SUCCESS);
        expect_status(s, pair, pair->send_cq, 2, wrong.status);
        expect_status(s, pair, pair->send_cq, 3, IBV_WC_WR_FLUSH_ERR);
        expect_status(s, pair, pair->send_cq, 4, IBV_WC_WR_FLUSH_ERR);
    } else {
        expect(s, pair, pair->recv_cq, &(struct expected){.wr_id = 100, .opcode = IBV_WC_RECV, .length = 10, .source = ANY});
        expect_status(s, pair, pair->recv_cq, 101, wrong.receive_status ? wrong.receive_status : IBV_WC_WR_FLUSH_ERR);
        if (!s->rxe) {
            int event = next_event(s, wrong.event ? 1000 : 0), wanted = wrong.event ? wrong.event : -1;
            MUST(event == wanted, "event %d, not %d", event, wanted);
        }
        for (size_t k = 4096; k < 32768; k++) /* the region, and beyond */
            MUST(s->in.bytes[k] == BLANK, "the refused request writes to %zu", k);
    }
    MUST(state_of(s, pair->qp) == IBV_QPS_ERR, "state %d, not ERR", state_of(s, pair->qp));
    /* What is posted now is flushed too. */
    if (s->requester) {
        struct ibv_sge small = entry(&s->out, 0, 10);
        struct ibv_send_wr wr = plain(pair, 9, IBV_WR_SEND, &small);
        post(s, pair, &wr);
        expect_status(s, pair, pair->send_cq, 9, IBV_WC_WR_FLUSH_ERR);
    } else if (!s->rxe) { /* whose library tells nobody of a receive: it would wait for a packet */
        post_receive(s, pair, 109, &first, 1);
        expect_status(s, pair, pair->recv_cq, 109, IBV_WC_WR_FLUSH_ERR);
    }
    sync_peer(s);
    works_again(s, pair);
}

#define READ_ONLY (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ)
#define WRITE_ONLY (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)
#define ACCESS .status = IBV_WC_REM_ACCESS_ERR, .event = IBV_EVENT_QP_ACCESS_ERR
#define INVALID .status = IBV_WC_REM_INV_REQ_ERR, .event = IBV_EVENT_QP_REQ_ERR
#define TOO_MANY .status = IBV_WC_REM_INV_REQ_ERR, .event = IBV_EVENT_QP_ACCESS_ERR
#define REFUSED(name, ...) static void name(struct session *s) { refused(s, (struct wrong){__VA_ARGS__}); }

REFUSED(key_write, .opcode = IBV_WR_RDMA_WRITE, .key = true, ACCESS)
REFUSED(key_write_long, .opcode = IBV_WR_RDMA_WRITE, .length = 12345, .key = true, ACCESS)
REFUSED(key_read, .opcode = IBV_WR_RDMA_READ, .key = true, ACCESS)
REFUSED(key_swap, .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .key = true, ACCESS)
REFUSED(key_add, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .key = true, ACCESS)
REFUSED(range_write, .opcode = IBV_WR_RDMA_WRITE, .offset = 8192 - 63, ACCESS)
REFUSED(range_write_long, .opcode = IBV_WR_RDMA_WRITE, .length = 8193, ACCESS)
REFUSED(range_read, .opcode = IBV_WR_RDMA_READ, .offset = -1, ACCESS)
REFUSED(range_add, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .offset = 8192, ACCESS)
REFUSED(rights_write, .opcode = IBV_WR_RDMA_WRITE, .region = READ_ONLY, ACCESS)
REFUSED(rights_read, .opcode = IBV_WR_RDMA_READ, .region = WRITE_ONLY, ACCESS)
REFUSED(rights_swap, .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .region = READ_ONLY | WRITE_ONLY, ACCESS)
REFUSED(qp_rights_write, .opcode = IBV_WR_RDMA_WRITE, .rights = READ_ONLY, INVALID)
REFUSED(qp_rights_read, .opcode = IBV_WR_RDMA_READ, .rights = WRITE_ONLY, INVALID)
REFUSED(qp_rights_add, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .rights = READ_ONLY | WRITE_ONLY, INVALID)
REFUSED(none_accepted_read, .opcode = IBV_WR_RDMA_READ, .none_accepted = true, TOO_MANY)
REFUSED(none_accepted_swap, .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .none_accepted = true, TOO_MANY)

/* rxe calls a receive that is too short a failure of its own. */
static void too_long(struct session *s, uint32_t length, uint32_t receive)
{
    bool rxe = s->requester ? s->peer_rxe : s->rxe;
    refused(s, (struct wrong){.opcode = IBV_WR_SEND, .length = length, .receive = receive,
        .status = rxe ? IBV_WC_REM_OP_ERR : IBV_WC_REM_INV_REQ_ERR, .receive_status = rxe ? IBV_WC_LOC_QP_OP_ERR : IBV_WC_LOC_LEN_ERR});
}

static void too_long_by_one(struct session *s) { too_long(s, 65, 64); }
static void too_long_by_packets(struct session *s) { too_long(s, 5 * (uint32_t)s->mtu, 64); }

/* The receive's memory is not what its key says. */
static void receive_key(struct session *s)
{
    bool rxe = s->requester ? s->peer_rxe : s->rxe;
    refused(s, (struct wrong){.opcode = IBV_WR_SEND, .receive_key = true, .status = IBV_WC_REM_OP_ERR,
        .receive_status = rxe ? IBV_WC_LOC_QP_OP_ERR : IBV_WC_LOC_PROT_ERR});
}

/* Atomics are for whole words. rxe's library posts no others. */
static void unaligned(struct session *s)
{
    bool rxe = s->requester ? s->rxe : s->peer_rxe;
    if (!rxe) {
        refused(s, (struct wrong){.opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .offset = 4, INVALID});
        refused(s, (struct wrong){.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .offset = 1, INVALID});
        return;
    }
    struct options options = defaults(s, IBV_QPT_RC);
    struct pair *pair = make_pair(s, &options);
    struct ibv_sge word = entry(&s->out, 0, 8);
    for (int i = 0; s->requester && i < 2; i++) {
        struct ibv_send_wr *bad = NULL, wr = plain(pair, 1, i ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP, &word);
        wr.wr.atomic.remote_addr += 4;
        int rc = ibv_post_send(pair->qp, &wr, &bad);
        MUST(rc == EINVAL && bad == &wr, "post_send of an unaligned atomic gives %d", rc);
    }
    sync_peer(s);
    works_again(s, pair);
}

/* The requester's own memory is not what its key says: the peer notices nothing. */
static void send_key(struct session *s)
{
    const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE};
    for (int i = 0; i < 2; i++) {
        struct options options = defaults(s, IBV_QPT_RC);
        struct pair *pair = make_pair(s, &options);
        struct ibv_sge place = entry(&s->in, 0, 64), from = entry(&s->out, 0, 64);
        from.lkey ^= 0x00770000;
        if (!s->requester)
            post_receive(s, pair, 1, &place, 1);
        sync_peer(s);
        if (s->requester) {
            struct ibv_send_wr next = plain(pair, 3, IBV_WR_SEND, &from), wr = plain(pair, 2, opcodes[i], &from);
            wr.next = &next;
            post(s, pair, &wr);
            expect_status(s, pair, pair->send_cq, 2, s->rxe ? IBV_WC_LOC_QP_OP_ERR : IBV_WC_LOC_PROT_ERR);
            expect_status(s, pair, pair->send_cq, 3, IBV_WC_WR_FLUSH_ERR);
            MUST(state_of(s, pair->qp) == IBV_QPS_ERR, "state %d, not ERR", state_of(s, pair->qp));
        }
        sync_peer(s);
        if (!s->requester) {
            MUST(state_of(s, pair->qp) == IBV_QPS_RTS, "state %d, not RTS", state_of(s, pair->qp));
            expect_nothing(s, pair->recv_cq, 10);
        }
        works_again(s, pair);
    }
}

/* The receive is posted long after the message has come: for each of what takes one, of one packet and of several. */
static void late_receive(struct session *s)
{
    const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM};
    struct options options = defaults(s, IBV_QPT_RC);
    struct pair *pair = make_pair(s, &options);
    for (int i = 0; i < 6; i++) {
        uint32_t length = i % 2 ? 3 * (uint32_t)s->mtu + 1 : 20;
        struct ibv_sge place = entry(&s->in, 0, length), from = entry(&s->out, 0, length);
        memset(s->in.bytes, BLANK, length);
        fill_pattern(s->out.bytes, length, (unsigned)i, s->number);
        sync_peer(s);
        if (s->requester) {
            struct ibv_send_wr wr = plain(pair, (uint64_t)i, opcodes[i / 2], &from);
            post(s, pair, &wr);
            expect_status(s, pair, pair->send_cq, (uint64_t)i, IBV_WC_SUCCESS);
        } else {
            expect_nothing(s, pair->recv_cq, 40);
            post_receive(s, pair, (uint64_t)i, &place, 1);
            expect_status(s, pair, pair->recv_cq, (uint64_t)i, IBV_WC_SUCCESS);
            uint8_t expected[3 * 4096 + 1];
            fill_pattern(expected, length, (unsigned)i, s->number);
            MUST(!memcmp(s->in.bytes, expected, length), "message %d is damaged", i);
        }
    }
    sync_peer(s);
}

/* The receive is never posted. */
static void no_receive(struct session *s, enum ibv_wr_opcode opcode, int retries)
{
    struct options options = defaults(s, IBV_QPT_RC);
    options.rnr_retry = retries;
    struct pair *pair = make_pair(s, &options);
    struct ibv_sge from = entry(&s->out, 0, 64);
    if (s->requester) {
        struct ibv_send_wr next = plain(pair, 2, IBV_WR_RDMA_WRITE, &from), wr = plain(pair, 1, opcode, &from);
        wr.next = &next;
        double begin = now();
        post(s, pair, &wr);
        expect_status(s, pair, pair->send_cq, 1, IBV_WC_RNR_RETRY_EXC_ERR);
        MUST(now() - begin < 5, "%d retries take %.1f s", retries, now() - begin);
        expect_status(s, pair, pair->send_cq, 2, IBV_WC_WR_FLUSH_ERR);
        MUST(state_of(s, pair->qp) == IBV_QPS_ERR, "state %d, not ERR", state_of(s, pair->qp));
    }
    sync_peer(s);
    if (!s->requester) {
        expect_nothing(s, pair->recv_cq, 10);
        MUST(state_of(s, pair->qp) == IBV_QPS_RTS, "state %d, not RTS", state_of(s, pair->qp));
    }
    works_again(s, pair);
}

static void no_receive_none(struct session *s) { no_receive(s, IBV_WR_SEND, 0); }
static void no_receive_few(struct session *s) { no_receive(s, IBV_WR_SEND, 3); }
static void no_receive_write(struct session *s) { no_receive(s, IBV_WR_RDMA_WRITE_WITH_IMM, 2); }

/* The peer's queue pair is gone: retries end in bounded time. */
static void gone(struct session *s)
{
    struct options options = defaults(s, IBV_QPT_RC);
    options.timeout = 13, options.retry = 3;
    struct pair *pair = make_pair(s, &options);
    struct ibv_sge from = entry(&s->out, 0, 64);
    if (!s->requester)
        to_state(s, pair, IBV_QPS_RESET);
    sync_peer(s);
    if (s->requester) {
        struct ibv_send_wr next = plain(pair, 2, IBV_WR_RDMA_READ, &from), wr = plain(pair, 1, IBV_WR_RDMA_WRITE, &from);
        wr.next = &next;
        double begin = now();
        post(s, pair, &wr);
        expect_status(s, pair, pair->send_cq, 1, IBV_WC_RETRY_EXC_ERR);
        double took = now() - begin, timeout = 4.096e-6 * (1 << 13);
        MUST(took > 3 * timeout && took < 10, "3 retries take %.3f s", took);
        expect_status(s, pair, pair->send_cq, 2, IBV_WC_WR_FLUSH_ERR);
    }
    sync_peer(s);
    works_again(s, pair);
}

/* One of many requests is refused: what precedes it is done, READs too, and what follows is not. */
static void one_of_many(struct session *s)
{
    enum { BEFORE = 20, AFTER = 10, LENGTH = 1500 };
    struct options options = defaults(s, IBV_QPT_RC);
    struct pair *pair = make_pair(s, &options);
    memset(s->in.bytes, BLANK, (BEFORE + AFTER + 1) * 4096);
    memset(s->out.bytes, 0x11, (BEFORE + AFTER + 1) * 4096);
    sync_peer(s);
    if (s->requester) {
        struct ibv_sge sges[BEFORE + 1 + AFTER];
        struct ibv_send_wr wrs[BEFORE + 1 + AFTER];
        for (int i = 0; i < BEFORE + 1 + AFTER; i++) {
            sges[i] = entry(&s->out, (size_t)i * 4096, LENGTH);
            wrs[i] = plain(pair, (uint64_t)i, i % 2 && i != BEFORE ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, &sges[i]);
            wrs[i].wr.rdma.remote_addr += (uint64_t)i * 4096;
            wrs[i].next = i < BEFORE + AFTER ? &wrs[i + 1] : NULL;
        }
        wrs[BEFORE].wr.rdma.rkey ^= 0x00770000;
        post(s, pair, wrs);
        for (int i = 0; i < BEFORE + 1 + AFTER; i++)
            expect_status(s, pair, pair->send_cq, (uint64_t)i, i < BEFORE ? IBV_WC_SUCCESS : i == BEFORE ? IBV_WC_REM_ACCESS_ERR : IBV_WC_WR_FLUSH_ERR);
    }
    sync_peer(s);
    for (int i = 0; i < BEFORE + 1 + AFTER; i++) {
        bool read = i % 2 && i != BEFORE, done = i < BEFORE && read == s->requester;
        uint8_t *bytes = (s->requester ? s->out.bytes : s->in.bytes) + i * 4096;
        for (int k = 0; k < 4096; k++) {
            bool of_message = k < LENGTH;
            uint8_t before = s->requester ? 0x11 : BLANK, after = s->requester ? BLANK : 0x11;
            MUST(bytes[k] == (done && of_message ? after : before), "request %d: byte %d is %#x", i, k, bytes[k]);
        }
    }
    works_again(s, pair);
}

const struct test error_tests[] = {
    {"error/key-write", key_write}, {"error/key-write-long", key_write_long}, {"error/key-read", key_read},
    {"error/key-swap", key_swap}, {"error/key-add", key_add}, {"error/range-write", range_write},
    {"error/range-write-long", range_write_long}, {"error/range-read", range_read}, {"error/range-add", range_add},
    {"error/rights-write", rights_write}, {"error/rights-read", rights_read}, {"error/rights-swap", rights_swap},
    {"error/qp-rights-write", qp_rights_write}, {"error/qp-rights-read", qp_rights_read}, {"error/qp-rights-add", qp_rights_add},
    {"error/none-accepted-read", none_accepted_read}, {"error/none-accepted-swap", none_accepted_swap},
    {"error/too-long", too_long_by_one}, {"error/too-long-packets", too_long_by_packets}, {"error/receive-key", receive_key},
    {"error/unaligned", unaligned}, {"error/send-key", send_key}, {"error/late-receive", late_receive},
    {"error/no-receive", no_receive_none}, {"error/no-receive-retries", no_receive_few}, {"error/no-receive-write", no_receive_write},
    {"error/gone", gone}, {"error/one-of-many", one_of_many}, {NULL, NULL},
};
