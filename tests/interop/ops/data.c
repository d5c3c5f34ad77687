/* Cases of RC: all operations, with nothing wrong. */
#include "ops.h"
#include <errno.h>
#include <poll.h>

static struct flow flow, back;

static struct pair *rc(struct session *s)
{
    struct options options = defaults(s, IBV_QPT_RC);
    flow.count = back.count = 0;
    return make_pair(s, &options);
}

/* All sizes around multiples of the path MTU. */
static void sizes(struct session *s, enum ibv_wr_opcode opcode)
{
    struct pair *pair = rc(s);
    uint32_t mtu = (uint32_t)s->mtu;
    const uint32_t lengths[] = {0, 1, 2, 3, 4, 5, 63, mtu - 1, mtu, mtu + 1, 2 * mtu - 1, 2 * mtu, 2 * mtu + 1, 3 * mtu, 4 * mtu - 3, 10 * mtu + 5, 65536};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        add(s, &flow, opcode, lengths[i]);
    run_flow(s, pair, &flow);
}

static void send_sizes(struct session *s) { sizes(s, IBV_WR_SEND); }
static void send_imm_sizes(struct session *s) { sizes(s, IBV_WR_SEND_WITH_IMM); }
static void write_sizes(struct session *s) { sizes(s, IBV_WR_RDMA_WRITE); }
static void write_imm_sizes(struct session *s) { sizes(s, IBV_WR_RDMA_WRITE_WITH_IMM); }
static void read_sizes(struct session *s) { sizes(s, IBV_WR_RDMA_READ); }

/* 1 and 4 MiB, and what is just no multiple. Where packets are lost less must do: rxe waits for a timeout with each. */
static void large(struct session *s, enum ibv_wr_opcode opcode)
{
    struct pair *pair = rc(s);
    uint32_t part = s->lossy ? 16 : 1;
    add(s, &flow, opcode, (1 << 20) / part);
    add(s, &flow, opcode, (1 << 20) / part + 1);
    add(s, &flow, opcode, (4 << 20) / part);
    run_flow(s, pair, &flow);
}

static void large_send(struct session *s) { large(s, IBV_WR_SEND); }
static void large_write(struct session *s) { large(s, IBV_WR_RDMA_WRITE_WITH_IMM); }
static void large_read(struct session *s) { large(s, IBV_WR_RDMA_READ); }

/* Lists of entries on both sides, that cut the packets anywhere; more entries than bytes, too. */
static void lists(struct session *s)
{
    const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
    struct pair *pair = rc(s);
    for (int i = 0; i < 3; i++)
        for (int k = 2; k <= SGES; k += 7) {
            add(s, &flow, opcodes[i], 3 * (uint32_t)s->mtu + 11);
            flow.messages[flow.count - 1].gather = k;
            flow.messages[flow.count - 1].scatter = SGES + 2 - k;
            add(s, &flow, opcodes[i], 5);
            flow.messages[flow.count - 1].gather = k;
            flow.messages[flow.count - 1].scatter = SGES + 2 - k;
        }
    run_flow(s, pair, &flow);
}

/* The data is taken when it is posted, and keys are not looked at. */
static void inlined(struct session *s)
{
    const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM};
    const uint32_t lengths[] = {0, 1, 7, 64, INLINE};
    struct pair *pair = rc(s);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 5; k++) {
            add(s, &flow, opcodes[i], lengths[k]);
            flow.messages[flow.count - 1].flags |= IBV_SEND_INLINE;
            flow.messages[flow.count - 1].gather = 1 + k % 3;
        }
    run_flow(s, pair, &flow);
}

/* READs and atomics, as many outstanding as both sides agree on. */
static void outstanding(struct session *s, int most)
{
    struct options options = defaults(s, IBV_QPT_RC);
    options.rd_atomic = options.dest_rd_atomic = most;
    flow.count = 0;
    struct pair *pair = make_pair(s, &options);
    for (int i = 0; i < 24; i++)
        add(s, &flow, i % 8 == 5 ? IBV_WR_ATOMIC_FETCH_AND_ADD : i % 8 == 7 ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_RDMA_READ,
            (uint32_t)(i * 397 % (4 * s->mtu)));
    run_flow(s, pair, &flow);
}

static void outstanding_each(struct session *s)
{
    for (int most = 1; most <= 16; most++) {
        outstanding(s, most);
        close_case(s);
    }
}

/* Swaps that match and that do not, and additions. */
static void atomics(struct session *s)
{
    struct pair *pair = rc(s);
    for (int i = 0; i < 16; i++)
        add(s, &flow, i < 8 ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_ATOMIC_FETCH_AND_ADD, 8);
    run_flow(s, pair, &flow);
}

/* Several queue pairs add to one word, many times at once: each addition finds another value. */
static void contention(struct session *s)
{
    enum { PAIRS = 4, EACH = 48 };
    struct options options = defaults(s, IBV_QPT_RC);
    struct pair *pairs[PAIRS];
    for (int i = 0; i < PAIRS; i++)
        pairs[i] = make_pair(s, &options);
    memset(s->in.bytes, 0, 8);
    uint64_t *results = (uint64_t *)s->out.bytes;
    bool seen[PAIRS * EACH] = {false};
    sync_peer(s);
    if (s->requester) {
        for (int k = 0; k < EACH; k++)
            for (int i = 0; i < PAIRS; i++) {
                struct ibv_sge sge = entry(&s->out, (size_t)(i * EACH + k) * 8, 8);
                struct ibv_send_wr wr = {.wr_id = (uint64_t)k, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
                    .send_flags = IBV_SEND_SIGNALED, .wr.atomic = {.remote_addr = pairs[i]->remote.addr, .rkey = pairs[i]->remote.rkey, .compare_add = 1}};
                post(s, pairs[i], &wr);
            }
        for (int k = 0; k < EACH; k++)
            for (int i = 0; i < PAIRS; i++)
                expect(s, pairs[i], pairs[i]->send_cq, &(struct expected){.wr_id = (uint64_t)k, .opcode = IBV_WC_FETCH_ADD, .length = 8});
        for (int i = 0; i < PAIRS * EACH; i++) {
            MUST(results[i] < PAIRS * EACH && !seen[results[i]], "the addition %d finds %lu, as another did", i, (unsigned long)results[i]);
            seen[results[i]] = true;
        }
    }
    sync_peer(s);
    uint64_t sum;
    memcpy(&sum, s->in.bytes, 8);
    MUST(s->requester || sum == PAIRS * EACH, "the sum is %lu, not %d", (unsigned long)sum, PAIRS * EACH);
}

/* A fenced SEND or WRITE carries what the READs before it have brought. */
static void fence(struct session *s)
{
    struct pair *pair = rc(s);
    uint32_t length = 3 * (uint32_t)s->mtu;
    uint8_t *expected = malloc(length);
    MUST(expected, "no memory");
    for (unsigned round = 0; round < 4; round++) {
        fill_pattern(expected, length, round, s->number);
        memcpy(s->in.bytes, expected, length);
        memset(s->in.bytes + length, BLANK, 2 * length);
        memset(s->out.bytes, BLANK, length);
        struct ibv_sge read = entry(&s->out, 0, length), place = entry(&s->in, 2 * length, length);
        if (!s->requester)
            post_receive(s, pair, 9, &place, 1);
        sync_peer(s);
        if (s->requester) {
            struct ibv_send_wr wrs[3] = {
                {.wr_id = 1, .next = &wrs[1], .sg_list = &read, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
                    .wr.rdma = {.remote_addr = pair->remote.addr, .rkey = pair->remote.rkey}},
                {.wr_id = 2, .next = &wrs[2], .sg_list = &read, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_FENCE,
                    .wr.rdma = {.remote_addr = pair->remote.addr + length, .rkey = pair->remote.rkey}},
                {.wr_id = 3, .sg_list = &read, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_FENCE | IBV_SEND_SIGNALED},
            };
            post(s, pair, wrs);
            expect(s, pair, pair->send_cq, &(struct expected){.wr_id = 3, .opcode = IBV_WC_SEND, .length = ANY});
        } else {
            expect(s, pair, pair->recv_cq, &(struct expected){.wr_id = 9, .opcode = IBV_WC_RECV, .length = length, .source = ANY});
            MUST(!memcmp(s->in.bytes + length, expected, length), "the fenced WRITE carries something else");
            MUST(!memcmp(s->in.bytes + 2 * length, expected, length), "the fenced SEND carries something else");
        }
        sync_peer(s);
    }
    free(expected);
}

/* Few of many have completions, and those make room for all. */
static void unsignaled(struct session *s)
{
    struct pair *pair = rc(s);
    for (int i = 0; i < 200; i++) {
        add(s, &flow, i % 3 ? IBV_WR_SEND : IBV_WR_RDMA_WRITE, 100);
        flow.messages[i].flags = i % 40 == 39 ? IBV_SEND_SIGNALED : 0;
    }
    run_flow(s, pair, &flow);
}

/* No bytes, with no entry and with one; the address and key of one-sided ones are not looked at. */
static void empty(struct session *s)
{
    const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ};
    struct pair *pair = rc(s);
    struct remote known = pair->remote;
    for (int i = 0; i < 10; i++) {
        add(s, &flow, opcodes[i % 5], 0);
        flow.messages[i].gather = i / 5;
    }
    run_flow(s, pair, &flow);
    pair->remote.addr = 0x123;
    if (!s->lossy) /* rxe looks at the key of a READ that comes twice */
        pair->remote.rkey = 0x456;
    run_flow(s, pair, &flow);
    pair->remote = known;
}

/* A completion queue that is armed for solicited events: only those wake it. */
static void solicited(struct session *s)
{
    struct options options = defaults(s, IBV_QPT_RC);
    options.notified = true;
    struct pair *pair = make_pair(s, &options);
    const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM};
    for (int i = 0; i < 6; i++) {
        enum ibv_wr_opcode opcode = opcodes[i / 2];
        bool wakes = i % 2;
        struct ibv_sge place = entry(&s->in, 0, 64), from = entry(&s->out, 0, 64);
        if (!s->requester) {
            post_receive(s, pair, (uint64_t)i, &place, 1);
            MUST(!ibv_req_notify_cq(pair->recv_cq, 1), "req_notify_cq");
        }
        sync_peer(s);
        if (s->requester) {
            struct ibv_send_wr wr = {.wr_id = (uint64_t)i, .sg_list = &from, .num_sge = 1, .opcode = opcode,
                .send_flags = IBV_SEND_SIGNALED | (wakes ? IBV_SEND_SOLICITED : 0),
                .wr.rdma = {.remote_addr = pair->remote.addr, .rkey = pair->remote.rkey}};
            post(s, pair, &wr);
            expect_status(s, pair, pair->send_cq, (uint64_t)i, IBV_WC_SUCCESS);
        }
        sync_peer(s); /* the message has arrived */
        if (!s->requester) {
            struct pollfd fd = {.fd = pair->channel->fd, .events = POLLIN};
            struct ibv_cq *cq;
            void *context;
            int woken = poll(&fd, 1, wakes ? PATIENCE * 1000 : 50);
            MUST(woken == wakes, "message %d, %s, gives %d events", i, wakes ? "solicited" : "not solicited", woken);
            if (woken) {
                MUST(!ibv_get_cq_event(pair->channel, &cq, &context) && cq == pair->recv_cq, "the event is of another queue");
                ibv_ack_cq_events(cq, 1);
            }
            expect_status(s, pair, pair->recv_cq, (uint64_t)i, IBV_WC_SUCCESS);
        }
    }
    sync_peer(s);
}

/* Receives come from a shared queue. */
static void shared(struct session *s)
{
    struct options options = defaults(s, IBV_QPT_RC);
    options.shared = true;
    flow.count = 0;
    struct pair *pair = make_pair(s, &options);
    for (int i = 0; i < 30; i++)
        add(s, &flow, i % 3 == 0 ? IBV_WR_SEND : i % 3 == 1 ? IBV_WR_SEND_WITH_IMM : IBV_WR_RDMA_WRITE_WITH_IMM, (uint32_t)(i * 211));
    run_flow(s, pair, &flow);
}

/* Everything at once, both ways, in an order that differs from run to run of the list. */
static void mixed(struct session *s, unsigned seed)
{
    const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
        IBV_WR_RDMA_READ, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP};
    struct pair *pair = rc(s);
    struct flow *flows[] = {&flow, &back};
    uint32_t random = seed * 2654435761u + 1;
    for (int f = 0; f < 2; f++) {
        flows[f]->seed = seed + (unsigned)f * 100;
        for (int i = 0; i < 120; i++) {
            random = random * 1664525 + 1013904223;
            uint32_t length = random >> 30 ? random >> 8 & 0xff : (random >> 8) % (6 * (uint32_t)s->mtu);
            add(s, flows[f], opcodes[random >> 24 & 7], length);
            struct message *m = &flows[f]->messages[i];
            m->gather = 1 + (int)(random >> 4 & 3), m->scatter = 1 + (int)(random >> 6 & 3);
            m->flags = i % 7 == 6 || i == 119 ? IBV_SEND_SIGNALED : 0;
            /* rxe that sends a fenced request again waits for the READs behind it, for ever. */
            bool rxe = (f == 0) == s->requester ? s->rxe : s->peer_rxe;
            m->flags |= (random >> 20 & 15) == 0 && !(rxe && s->lossy) ? IBV_SEND_FENCE : 0;
            if (length <= INLINE && m->opcode <= IBV_WR_SEND_WITH_IMM && random >> 12 & 1)
                m->flags |= IBV_SEND_INLINE;
        }
    }
    run_flows(s, pair, flows[!s->requester], flows[s->requester]);
}

static void mixed_1(struct session *s) { mixed(s, 1); }
static void mixed_2(struct session *s) { mixed(s, 2); }
static void mixed_3(struct session *s) { mixed(s, 3); }

const struct test data_tests[] = {
    {"rc/send", send_sizes}, {"rc/send-imm", send_imm_sizes}, {"rc/write", write_sizes}, {"rc/write-imm", write_imm_sizes},
    {"rc/read", read_sizes}, {"rc/large-send", large_send}, {"rc/large-write", large_write}, {"rc/large-read", large_read},
    {"rc/lists", lists}, {"rc/inline", inlined}, {"rc/outstanding", outstanding_each}, {"rc/atomics", atomics},
    {"rc/contention", contention}, {"rc/fence", fence}, {"rc/unsignaled", unsignaled}, {"rc/empty", empty},
    {"rc/solicited", solicited}, {"rc/shared", shared}, {"rc/mixed-1", mixed_1}, {"rc/mixed-2", mixed_2},
    {"rc/mixed-3", mixed_3}, {NULL, NULL},
};
