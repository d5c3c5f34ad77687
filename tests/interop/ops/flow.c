/* Messages from a requester to a responder: posted, awaited, and compared in the memory of both sides.
 *
 * Each side has a model of its areas: what they should hold at the end. Message i lies at the same offset of the
 * requester's area `out` and of the responder's `in`; between messages there is room that nobody may touch. */
#include "ops.h"
#include <arpa/inet.h>

static bool is_send(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_SEND_WITH_INV;
}

static bool is_atomic(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

static bool takes_receive(enum ibv_wr_opcode opcode)
{
    return is_send(opcode) || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static bool brings_data(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_RDMA_READ || is_atomic(opcode);
}

static enum ibv_wc_opcode sent_opcode(enum ibv_wr_opcode opcode)
{
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM: return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ: return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP: return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD: return IBV_WC_FETCH_ADD;
    default: return IBV_WC_SEND;
    }
}

static uint32_t immediate(int index)
{
    return htonl(0xcafe0000 + (uint32_t)index);
}

static uint8_t pattern(size_t i, unsigned index, unsigned seed)
{
    return (uint8_t)(i * 7 + (i >> 8) * 13 + index * 31 + seed);
}

void fill_pattern(uint8_t *bytes, size_t length, unsigned index, unsigned seed)
{
    for (size_t i = 0; i < length; i++)
        bytes[i] = pattern(i, index, seed);
}

struct ibv_sge entry(const struct area *area, size_t offset, uint32_t length)
{
    return (struct ibv_sge){.addr = (uintptr_t)area->bytes + offset, .length = length, .lkey = area->mr->lkey};
}

/* Cuts the place of a message into so many entries of unequal lengths, of which the first lies last. */
static void entries(const struct area *area, size_t offset, uint32_t length, int count, struct ibv_sge *sges)
{
    uint32_t left = length;
    for (int i = 0; i < count; i++) {
        uint32_t even = length / (uint32_t)count, part = i == count - 1 ? left : i % 2 ? even : even - even / 3;
        left -= part;
        sges[i] = entry(area, offset + left, part);
    }
}

/* The bytes of a message where the entries have them in the model. */
static void model_entries(struct area *area, const struct ibv_sge *sges, int count, unsigned index, unsigned seed)
{
    size_t at = 0;
    for (int i = 0; i < count; i++)
        for (uint32_t k = 0; k < sges[i].length; k++)
            area->model[sges[i].addr - (uintptr_t)area->bytes + k] = pattern(at++, index, seed);
}

/* Adds a message: signaled, and with lists of one entry. */
void add(struct session *s, struct flow *flow, enum ibv_wr_opcode opcode, uint32_t length)
{
    MUST(flow->count < MOST, "too many messages");
    int index = flow->count++;
    struct message *m = &flow->messages[index];
    size_t end = index ? m[-1].offset + m[-1].length : 0;
    *m = (struct message){.opcode = opcode, .length = is_atomic(opcode) ? 8 : length, .gather = 1, .scatter = 1, .flags = IBV_SEND_SIGNALED};
    /* Atomics are aligned, the others mostly not. */
    m->offset = (end + 127) / 64 * 64 + (is_atomic(opcode) ? 0 : (size_t)index % 8);
    MUST(m->offset + m->length < AREA, "the messages are too long altogether");
}

static size_t end_of(const struct flow *flow)
{
    const struct message *last = &flow->messages[flow->count - 1];
    size_t end = flow->count ? last->offset + last->length + 4096 : 0;
    return end < AREA ? end : AREA;
}

/* What atomics add, expect and put. */
static uint64_t addend(int index)
{
    return 0x0101010101010101 * (uint64_t)(index + 1);
}

/* A word of the model, in the byte order of the host, as atomics have it. */
static uint64_t word_at(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static uint64_t word_of(int index, unsigned seed)
{
    uint8_t bytes[8];
    fill_pattern(bytes, 8, (unsigned)index, seed);
    return word_at(bytes);
}

static bool swaps(int index)
{
    return index % 2 == 0;
}

void post_receive(struct session *s, struct pair *pair, uint64_t wr_id, struct ibv_sge *sges, int count)
{
    struct ibv_recv_wr *bad, wr = {.wr_id = wr_id, .sg_list = sges, .num_sge = count};
    int rc = pair->srq ? ibv_post_srq_recv(pair->srq, &wr, &bad) : ibv_post_recv(pair->qp, &wr, &bad);
    MUST(!rc, "post_recv: %s", strerror(rc));
}

void post(struct session *s, struct pair *pair, struct ibv_send_wr *wr)
{
    struct ibv_send_wr *bad;
    int rc = ibv_post_send(pair->qp, wr, &bad);
    MUST(!rc, "post_send of opcode %d: %s", bad->opcode, strerror(rc));
}

/* What the responder has before the first message, and its receives. */
static void prepare_in(struct session *s, struct pair *pair, struct flow *flow)
{
    struct area *area = &s->in;
    memset(area->model, BLANK, end_of(flow));
    for (int i = 0; i < flow->count; i++) {
        struct message *m = &flow->messages[i];
        struct ibv_sge sges[SGES];
        if (brings_data(m->opcode))
            fill_pattern(area->model + m->offset, m->length, (unsigned)i, flow->seed);
        if (!takes_receive(m->opcode))
            continue;
        int count = is_send(m->opcode) ? m->scatter : 0;
        entries(area, m->offset, m->length, count, sges);
        post_receive(s, pair, (uint64_t)i, sges, count);
    }
    memcpy(area->bytes, area->model, end_of(flow));
}

/* What the responder has at the end. */
static void finish_in(struct session *s, struct flow *flow)
{
    struct area *area = &s->in;
    for (int i = 0; i < flow->count; i++) {
        struct message *m = &flow->messages[i];
        uint8_t *place = area->model + m->offset;
        struct ibv_sge sges[SGES];
        uint64_t word = word_of(i, flow->seed);
        if (is_send(m->opcode)) {
            entries(area, m->offset, m->length, m->scatter, sges);
            model_entries(area, sges, m->scatter, (unsigned)i, flow->seed);
        } else if (!brings_data(m->opcode)) {
            fill_pattern(place, m->length, (unsigned)i, flow->seed);
        } else if (m->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
            word += addend(i);
            memcpy(place, &word, 8);
        } else if (is_atomic(m->opcode) && swaps(i)) {
            word = addend(i);
            memcpy(place, &word, 8);
        }
    }
    for (size_t k = 0; k < end_of(flow); k++)
        MUST(area->bytes[k] == area->model[k], "the responder's byte %zu is %#x, not %#x", k, area->bytes[k], area->model[k]);
}

/* What the requester has before the first message. */
static void prepare_out(struct session *s, struct flow *flow)
{
    struct area *area = &s->out;
    memset(area->model, BLANK, end_of(flow));
    for (int i = 0; i < flow->count; i++) {
        struct message *m = &flow->messages[i];
        struct ibv_sge sges[SGES];
        entries(area, m->offset, m->length, m->gather, sges);
        if (!brings_data(m->opcode))
            model_entries(area, sges, m->gather, (unsigned)i, flow->seed);
    }
    memcpy(area->bytes, area->model, end_of(flow));
}

static void finish_out(struct session *s, struct flow *flow)
{
    struct area *area = &s->out;
    for (int i = 0; i < flow->count; i++) {
        struct message *m = &flow->messages[i];
        struct ibv_sge sges[SGES];
        entries(area, m->offset, m->length, m->gather, sges);
        if (brings_data(m->opcode))
            model_entries(area, sges, m->gather, (unsigned)i, flow->seed);
        if (m->flags & IBV_SEND_INLINE)
            memset(area->model + m->offset, SPOILT, m->length);
    }
    for (size_t k = 0; k < end_of(flow); k++)
        MUST(area->bytes[k] == area->model[k], "the requester's byte %zu is %#x, not %#x", k, area->bytes[k], area->model[k]);
}

/* Posts one message; the next ones follow in the list that `wr` begins. */
static void make_request(struct session *s, const struct pair *pair, struct flow *flow, int i, struct ibv_send_wr *wr, struct ibv_sge *sges)
{
    struct message *m = &flow->messages[i];
    entries(&s->out, m->offset, m->length, m->gather, sges);
    *wr = (struct ibv_send_wr){.wr_id = (uint64_t)i, .sg_list = sges, .num_sge = m->gather, .opcode = m->opcode, .send_flags = m->flags};
    if (m->flags & IBV_SEND_INLINE)
        for (int k = 0; k < m->gather; k++)
            sges[k].lkey = 0xbad; /* nobody looks at it */
    if (m->opcode == IBV_WR_SEND_WITH_INV)
        wr->invalidate_rkey = m->invalidate;
    else
        wr->imm_data = immediate(i);
    uint64_t addr = pair->remote.addr + m->offset;
    if (m->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr->wr.atomic.remote_addr = addr, wr->wr.atomic.rkey = pair->remote.rkey;
        wr->wr.atomic.compare_add = addend(i);
    } else if (is_atomic(m->opcode)) {
        wr->wr.atomic.remote_addr = addr, wr->wr.atomic.rkey = pair->remote.rkey;
        wr->wr.atomic.compare_add = word_of(i, flow->seed) + !swaps(i), wr->wr.atomic.swap = addend(i);
    } else if (!is_send(m->opcode)) {
        wr->wr.rdma.remote_addr = addr, wr->wr.rdma.rkey = pair->remote.rkey;
    }
}

/* Posts as many messages from `first` on as the queue has room for, in one list; returns how many. */
static int post_some(struct session *s, struct pair *pair, struct flow *flow, int first, int room)
{
    static struct ibv_send_wr wrs[DEPTH];
    static struct ibv_sge sges[DEPTH][SGES];
    int count = flow->count - first < room ? flow->count - first : room;
    if (!count)
        return 0;
    for (int k = 0; k < count; k++) {
        make_request(s, pair, flow, first + k, &wrs[k], sges[k]);
        wrs[k].next = k + 1 < count ? &wrs[k + 1] : NULL;
    }
    post(s, pair, wrs);
    for (int k = 0; k < count; k++) {
        struct message *m = &flow->messages[first + k];
        if (m->flags & IBV_SEND_INLINE)
            memset(s->out.bytes + m->offset, SPOILT, m->length);
    }
    return count;
}

static void check_sent(struct session *s, struct pair *pair, struct flow *flow, const struct ibv_wc *wc, int index)
{
    MUST(index < flow->count, "a completion too many: %#lx", (unsigned long)wc->wr_id);
    struct message *m = &flow->messages[index];
    check_completion(s, pair, wc, &(struct expected){.wr_id = (uint64_t)index, .opcode = sent_opcode(m->opcode),
        .length = brings_data(m->opcode) ? (int64_t)m->length : ANY});
}

static void check_received(struct session *s, struct pair *pair, struct flow *flow, const struct ibv_wc *wc, int index)
{
    MUST(index < flow->count, "a completion too many: %#lx", (unsigned long)wc->wr_id);
    struct message *m = &flow->messages[index];
    bool invalidates = m->opcode == IBV_WR_SEND_WITH_INV;
    bool with_imm = m->opcode == IBV_WR_SEND_WITH_IMM || m->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    check_completion(s, pair, wc, &(struct expected){.wr_id = (uint64_t)index, .length = m->length, .source = ANY,
        .opcode = is_send(m->opcode) ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM,
        .flags = invalidates ? IBV_WC_WITH_INV : with_imm ? IBV_WC_WITH_IMM : 0,
        .imm = invalidates ? m->invalidate : immediate(index)});
}

/* The first message from `from` on that completes, at the requester (signaled) or at the responder (receives). */
static int next_of(const struct flow *flow, int from, bool sent)
{
    while (from < flow->count && !(sent ? (flow->messages[from].flags & IBV_SEND_SIGNALED) != 0 : takes_receive(flow->messages[from].opcode)))
        from++;
    return from;
}

/* Sends the messages of `out` to the peer while it sends those of `in`; each side calls it with the same two. */
void run_flows(struct session *s, struct pair *pair, struct flow *out, struct flow *in)
{
    prepare_in(s, pair, in);
    prepare_out(s, out);
    sync_peer(s);
    int posted = 0, done = 0, sent = next_of(out, 0, true), received = next_of(in, 0, false);
    double end = now() + PATIENCE;
    for (unsigned tries = 1; sent < out->count || received < in->count || posted < out->count; tries++) {
        struct ibv_wc wc;
        if (tries % 1024 == 0)
            notice_end(s);
        int n = post_some(s, pair, out, posted, DEPTH - (posted - done));
        posted += n;
        if (try_completion(s, pair->send_cq, &wc)) {
            check_sent(s, pair, out, &wc, sent);
            done = sent + 1;
            sent = next_of(out, done, true);
            end = now() + PATIENCE;
        }
        if (try_completion(s, pair->recv_cq, &wc)) {
            check_received(s, pair, in, &wc, received);
            received = next_of(in, received + 1, false);
            end = now() + PATIENCE;
        }
        MUST(now() < end, "no completion in %d s: %d of %d sent, %d of %d received", PATIENCE, sent, out->count, received, in->count);
    }
    sync_peer(s);
    expect_nothing(s, pair->send_cq, 0);
    expect_nothing(s, pair->recv_cq, 0);
    finish_in(s, in);
    finish_out(s, out);
}

/* From the requester to the responder only. */
void run_flow(struct session *s, struct pair *pair, struct flow *flow)
{
    static struct flow none;
    flow->seed = s->number;
    none.count = 0;
    if (s->requester)
        run_flows(s, pair, flow, &none);
    else
        run_flows(s, pair, &none, flow);
}
