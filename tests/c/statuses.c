/* statuses CASE: every error of a work request, with the completions and events of both sides and what becomes of the QPs. */
#include "verbs_any.h"
#include <sys/mman.h>

#define NONE -1 /* no completion, no event */

/* What one test does, and what is to come of it. */
struct test {
    const char *name;
    enum ibv_qp_type type;
    enum ibv_wr_opcode opcode;
    uint32_t length, room;       /* bytes of the request, and of the receive posted at the peer; 0: none is */
    uint64_t remote;             /* where in the peer's buffer */
    int local_key, receive_key, remote_key; /* see region() */
    int access;                  /* of the peer's QP; 0: all */
    int sender, receiver;        /* statuses */
    int event;                   /* at the peer */
    enum ibv_qp_state sender_state, receiver_state;
};

enum { GOOD, WRONG, OTHER_PD, READ_ONLY, NO_REMOTE, GONE };

static struct ibv_context *context;
static struct ibv_pd *pd, *other_pd;

/* A region over the same buffer that is wrong in this way. */
static struct ibv_mr *region(struct any *any, int kind)
{
    int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    struct ibv_mr *mr = NULL;
    void *page;
    switch (kind) {
    case OTHER_PD: mr = ibv_reg_mr(other_pd, any->buffer, BUFFER, all); break;
    case READ_ONLY: mr = ibv_reg_mr(pd, any->buffer, BUFFER, IBV_ACCESS_REMOTE_READ); break;
    case NO_REMOTE: mr = ibv_reg_mr(pd, any->buffer, BUFFER, IBV_ACCESS_LOCAL_WRITE); break;
    case GONE:
        page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(page != MAP_FAILED, "mmap: %s", strerror(errno));
        mr = ibv_reg_mr_iova(pd, page, 4096, (uintptr_t)any->buffer, all);
        CHECK(!munmap(page, 4096), "munmap: %s", strerror(errno));
        break;
    default: return NULL;
    }
    CHECK(mr, "reg_mr: %s", strerror(errno));
    return mr;
}

static void run(const struct test *t)
{
    struct any two[2];
    for (int i = 0; i < 2; i++)
        two[i] = make_any(context, pd, t->type);
    struct any *from = &two[0], *to = &two[1];
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr attr = good_attr(context, two[!i].qp->qp_num);
        attr.retry_cnt = 1;
        if (i == 1 && t->access)
            attr.qp_access_flags = t->access;
        take_to(&two[i], IBV_QPS_RTS, attr);
    }
    struct ibv_mr *made[3] = {region(from, t->local_key), region(to, t->receive_key), region(to, t->remote_key)};
    struct ibv_sge sge = piece(from, 4096, t->length), receive = piece(to, 8192, t->room);
    sge.lkey = made[0] ? made[0]->lkey : from->mr->lkey ^ (t->local_key == WRONG);
    receive.lkey = made[1] ? made[1]->lkey : to->mr->lkey ^ (t->receive_key == WRONG);
    uint32_t rkey = made[2] ? made[2]->rkey : to->mr->rkey ^ (t->remote_key == WRONG);
    if (t->room)
        FAILS(receive_one(to, 77, receive), 0);
    struct ibv_ah *ah = t->type == IBV_QPT_UD ? handle_to(pd, good_attr(context, 0)) : NULL;
    struct ibv_send_wr wr = {.wr_id = 55, .opcode = t->opcode, .imm_data = 5};
    if (ah) {
        wr.wr.ud.ah = ah, wr.wr.ud.remote_qpn = to->qp->qp_num, wr.wr.ud.remote_qkey = QKEY;
    } else if (t->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = (uintptr_t)to->buffer + t->remote, wr.wr.atomic.rkey = rkey, wr.wr.atomic.compare_add = 1;
    } else {
        wr.wr.rdma.remote_addr = (uintptr_t)to->buffer + t->remote, wr.wr.rdma.rkey = rkey;
    }
    int posted = post_one(from, &sge, wr);
    CHECK(!posted, "%s: post_send: %s", t->name, strerror(posted));

    struct ibv_wc wc = next_wc(from->send_cq);
    CHECK(wc.status == (enum ibv_wc_status)t->sender, "%s: the sender's status is %s", t->name, ibv_wc_status_str(wc.status));
    CHECK(wc.wr_id == 55 && wc.qp_num == from->qp->qp_num, "%s: wr_id %d, qp_num %#x", t->name, (int)wc.wr_id, wc.qp_num);
    CHECK(!wc.vendor_err == (wc.status == IBV_WC_SUCCESS), "%s: vendor_err %u", t->name, wc.vendor_err);
    if (t->receiver != NONE) {
        wc = next_wc(to->recv_cq);
        CHECK(wc.status == (enum ibv_wc_status)t->receiver, "%s: the receiver's status is %s", t->name, ibv_wc_status_str(wc.status));
        CHECK(wc.wr_id == 77 && wc.qp_num == to->qp->qp_num, "%s: wr_id %d, qp_num %#x", t->name, (int)wc.wr_id, wc.qp_num);
        CHECK(!wc.vendor_err == (wc.status == IBV_WC_SUCCESS), "%s: vendor_err %u", t->name, wc.vendor_err);
    }
    if (t->event != NONE) {
        struct ibv_async_event event = next_event(context);
        CHECK(event.event_type == (enum ibv_event_type)t->event, "%s: %s", t->name, ibv_event_type_str(event.event_type));
        CHECK(event.element.qp == to->qp, "%s: the event is of another QP", t->name);
        ibv_ack_async_event(&event);
    }
    CHECK(!readable(context->async_fd, 0), "%s: an event", t->name);
    CHECK(state_of(from) == t->sender_state, "%s: the sender is in state %d", t->name, state_of(from));
    CHECK(state_of(to) == t->receiver_state, "%s: the receiver is in state %d", t->name, state_of(to));
    if (t->sender_state != IBV_QPS_RTS) { /* what follows flushes */
        struct ibv_sge good = piece(from, 0, 8);
        wr.wr_id = 56;
        FAILS(post_one(from, &good, wr), 0);
        wc = next_wc(from->send_cq);
        CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 56, "%s: %s", t->name, ibv_wc_status_str(wc.status));
    }
    CHECK(ibv_poll_cq(from->send_cq, 1, &wc) == 0 && ibv_poll_cq(to->recv_cq, 1, &wc) == 0, "%s: a completion too many", t->name);
    for (int i = 0; i < 3; i++)
        if (made[i])
            FAILS(ibv_dereg_mr(made[i]), 0);
    if (ah)
        FAILS(ibv_destroy_ah(ah), 0);
    destroy_any(from);
    destroy_any(to);
}

#define RC IBV_QPT_RC
#define UC IBV_QPT_UC
#define UD IBV_QPT_UD
#define SEND IBV_WR_SEND
#define WRITE IBV_WR_RDMA_WRITE
#define WRITE_IMM IBV_WR_RDMA_WRITE_WITH_IMM
#define READ IBV_WR_RDMA_READ
#define ADD IBV_WR_ATOMIC_FETCH_AND_ADD
#define OK IBV_WC_SUCCESS
#define PROT IBV_WC_LOC_PROT_ERR
#define FLUSH IBV_WC_WR_FLUSH_ERR
#define ACCESS IBV_WC_REM_ACCESS_ERR
#define INVALID IBV_WC_REM_INV_REQ_ERR
#define ACCESS_EVENT IBV_EVENT_QP_ACCESS_ERR
#define RTS IBV_QPS_RTS
#define SQE IBV_QPS_SQE
#define ERR IBV_QPS_ERR

static const struct test tests[] = {
    /* name, type, opcode, length, room, remote, keys: local, receive, remote; access; statuses; event; states */
    {"fits", RC, SEND, 100, 100, 0, 0, 0, 0, 0, OK, OK, NONE, RTS, RTS},
    /* Lengths. */
    {"too-long-for-the-receive", RC, SEND, 101, 100, 0, 0, 0, 0, 0, INVALID, IBV_WC_LOC_LEN_ERR, NONE, ERR, ERR},
    {"too-long-in-the-second-packet", RC, SEND, 1025, 1024, 0, 0, 0, 0, 0, INVALID, IBV_WC_LOC_LEN_ERR, NONE, ERR, ERR},
    {"longer-than-a-message", RC, SEND, 0xffffffff, 0, 0, 0, 0, 0, 0, IBV_WC_LOC_LEN_ERR, NONE, NONE, ERR, RTS},
    {"atomic-of-four-bytes", RC, ADD, 4, 0, 0, 0, 0, 0, 0, IBV_WC_LOC_LEN_ERR, NONE, NONE, ERR, RTS},
    {"immediate-needs-no-room", RC, WRITE_IMM, 3000, 1, 0, 0, 0, 0, 0, OK, OK, NONE, RTS, RTS},
    /* Local memory. */
    {"local-key", RC, SEND, 8, 100, 0, WRONG, 0, 0, 0, PROT, NONE, NONE, ERR, RTS},
    {"local-pd", RC, SEND, 8, 100, 0, OTHER_PD, 0, 0, 0, PROT, NONE, NONE, ERR, RTS},
    {"local-range", RC, WRITE, BUFFER - 4095, 0, 0, 0, 0, 0, 0, PROT, NONE, NONE, ERR, RTS},
    {"local-memory-gone", RC, SEND, 8, 100, 0, GONE, 0, 0, 0, PROT, NONE, NONE, ERR, RTS},
    {"no-local-write-for-a-read", RC, READ, 8, 0, 0, READ_ONLY, 0, 0, 0, PROT, NONE, NONE, ERR, RTS},
    {"no-local-write-for-an-atomic", RC, ADD, 8, 0, 0, READ_ONLY, 0, 0, 0, PROT, NONE, NONE, ERR, RTS},
    {"no-local-write-to-send", RC, SEND, 8, 100, 0, READ_ONLY, 0, 0, 0, OK, OK, NONE, RTS, RTS},
    /* The memory of receives. */
    {"receive-key", RC, SEND, 8, 100, 0, 0, WRONG, 0, 0, IBV_WC_REM_OP_ERR, PROT, NONE, ERR, ERR},
    {"receive-pd", RC, SEND, 8, 100, 0, 0, OTHER_PD, 0, 0, IBV_WC_REM_OP_ERR, PROT, NONE, ERR, ERR},
    {"receive-without-local-write", RC, SEND, 8, 100, 0, 0, READ_ONLY, 0, 0, IBV_WC_REM_OP_ERR, PROT, NONE, ERR, ERR},
    {"receive-range", RC, SEND, 60000, 65000, 0, 0, 0, 0, 0, IBV_WC_REM_OP_ERR, PROT, NONE, ERR, ERR},
    {"receive-memory-gone", RC, SEND, 8, 100, 0, 0, GONE, 0, 0, IBV_WC_REM_OP_ERR, PROT, NONE, ERR, ERR},
    {"receive-of-nothing", RC, SEND, 0, 100, 0, 0, WRONG, 0, 0, OK, OK, NONE, RTS, RTS},
    /* Remote memory. */
    {"write-key", RC, WRITE, 8, 100, 0, 0, 0, WRONG, 0, ACCESS, FLUSH, ACCESS_EVENT, ERR, ERR},
    {"write-pd", RC, WRITE, 8, 100, 0, 0, 0, OTHER_PD, 0, ACCESS, FLUSH, ACCESS_EVENT, ERR, ERR},
    {"write-right", RC, WRITE, 8, 100, 0, 0, 0, READ_ONLY, 0, ACCESS, FLUSH, ACCESS_EVENT, ERR, ERR},
    {"write-range", RC, WRITE, 8, 100, BUFFER - 7, 0, 0, 0, 0, ACCESS, FLUSH, ACCESS_EVENT, ERR, ERR},
    {"write-immediate-key", RC, WRITE_IMM, 8, 100, 0, 0, 0, WRONG, 0, ACCESS, FLUSH, ACCESS_EVENT, ERR, ERR},
    {"write-of-nothing", RC, WRITE, 0, 0, 0, 0, 0, WRONG, 0, OK, NONE, NONE, RTS, RTS},
    {"read-key", RC, READ, 8, 100, 0, 0, 0, WRONG, 0, ACCESS, FLUSH, ACCESS_EVENT, ERR, ERR},
    {"read-right", RC, READ, 8, 100, 0, 0, 0, NO_REMOTE, 0, ACCESS, FLUSH, ACCESS_EVENT, ERR, ERR},
    {"read-range", RC, READ, 8, 100, BUFFER - 7, 0, 0, 0, 0, ACCESS, FLUSH, ACCESS_EVENT, ERR, ERR},
    {"atomic-key", RC, ADD, 8, 100, 0, 0, 0, WRONG, 0, ACCESS, FLUSH, ACCESS_EVENT, ERR, ERR},
    {"atomic-right", RC, ADD, 8, 100, 0, 0, 0, READ_ONLY, 0, ACCESS, FLUSH, ACCESS_EVENT, ERR, ERR},
    {"atomic-alignment", RC, ADD, 8, 100, 4, 0, 0, 0, 0, INVALID, FLUSH, ACCESS_EVENT, ERR, ERR},
    {"write-memory-gone", RC, WRITE, 8, 100, 0, 0, 0, GONE, 0, IBV_WC_REM_OP_ERR, FLUSH, IBV_EVENT_QP_FATAL, ERR, ERR},
    {"read-memory-gone", RC, READ, 8, 100, 0, 0, 0, GONE, 0, IBV_WC_REM_OP_ERR, FLUSH, IBV_EVENT_QP_FATAL, ERR, ERR},
    {"atomic-memory-gone", RC, ADD, 8, 100, 0, 0, 0, GONE, 0, IBV_WC_REM_OP_ERR, FLUSH, IBV_EVENT_QP_FATAL, ERR, ERR},
    /* What the peer's QP does not take. */
    {"no-writes", RC, WRITE, 8, 100, 0, 0, 0, 0, IBV_ACCESS_REMOTE_READ, INVALID, FLUSH, IBV_EVENT_QP_REQ_ERR, ERR, ERR},
    {"no-reads", RC, READ, 8, 100, 0, 0, 0, 0, IBV_ACCESS_REMOTE_WRITE, INVALID, FLUSH, IBV_EVENT_QP_REQ_ERR, ERR, ERR},
    {"no-atomics", RC, ADD, 8, 100, 0, 0, 0, 0, IBV_ACCESS_REMOTE_WRITE, INVALID, FLUSH, IBV_EVENT_QP_REQ_ERR, ERR, ERR},
    {"no-receive", RC, SEND, 8, 0, 0, 0, 0, 0, 0, IBV_WC_RNR_RETRY_EXC_ERR, NONE, NONE, ERR, RTS},
    {"no-receive-for-the-immediate", RC, WRITE_IMM, 8, 0, 0, 0, 0, 0, 0, IBV_WC_RNR_RETRY_EXC_ERR, NONE, NONE, ERR, RTS},
    /* UC: the sender does not learn of it. */
    {"uc-local-key", UC, SEND, 8, 100, 0, WRONG, 0, 0, 0, PROT, NONE, NONE, SQE, RTS},
    {"uc-longer-than-a-message", UC, SEND, 0xffffffff, 0, 0, 0, 0, 0, 0, IBV_WC_LOC_LEN_ERR, NONE, NONE, SQE, RTS},
    {"uc-too-long-for-the-receive", UC, SEND, 101, 100, 0, 0, 0, 0, 0, OK, IBV_WC_LOC_LEN_ERR, NONE, RTS, ERR},
    {"uc-receive-key", UC, SEND, 8, 100, 0, 0, WRONG, 0, 0, OK, PROT, NONE, RTS, ERR},
    {"uc-write-key", UC, WRITE, 8, 0, 0, 0, 0, WRONG, 0, OK, NONE, NONE, RTS, RTS},
    {"uc-no-receive", UC, SEND, 8, 0, 0, 0, 0, 0, 0, OK, NONE, NONE, RTS, RTS},
    /* UD. */
    {"ud-fits", UD, SEND, 60, 100, 0, 0, 0, 0, 0, OK, OK, NONE, RTS, RTS},
    {"ud-local-key", UD, SEND, 8, 100, 0, WRONG, 0, 0, 0, PROT, NONE, NONE, SQE, RTS},
    {"ud-longer-than-the-mtu", UD, SEND, 4097, 0, 0, 0, 0, 0, 0, IBV_WC_LOC_LEN_ERR, NONE, NONE, SQE, RTS},
    {"ud-too-long-for-the-receive", UD, SEND, 61, 100, 0, 0, 0, 0, 0, OK, IBV_WC_LOC_LEN_ERR, NONE, RTS, ERR},
    {"ud-no-room-for-the-header", UD, SEND, 0, 39, 0, 0, 0, 0, 0, OK, IBV_WC_LOC_LEN_ERR, NONE, RTS, ERR},
    {"ud-receive-key", UD, SEND, 8, 100, 0, 0, WRONG, 0, 0, OK, PROT, NONE, RTS, ERR},
    {"ud-no-receive", UD, SEND, 8, 0, 0, 0, 0, 0, 0, OK, NONE, NONE, RTS, RTS},
};

static void of_type(enum ibv_qp_type type)
{
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++)
        if (tests[i].type == type)
            run(&tests[i]);
}

static void rc(void) { of_type(RC); }
static void uc(void) { of_type(UC); }
static void ud(void) { of_type(UD); }

/* Nobody answers: the retries run out; everything behind flushes in order. */
static void nobody(void)
{
    struct any any = make_any(context, pd, RC);
    struct ibv_qp_attr attr = good_attr(context, any.qp->qp_num ^ 1);
    attr.timeout = 8, attr.retry_cnt = 1;
    take_to(&any, RTS, attr);
    struct ibv_sge sge = piece(&any, 0, 8);
    for (int i = 0; i < 3; i++)
        FAILS(post_one(&any, &sge, (struct ibv_send_wr){.wr_id = i, .opcode = SEND}), 0);
    for (int i = 0; i < 3; i++) {
        struct ibv_wc wc = next_wc(any.send_cq);
        CHECK(wc.status == (i ? FLUSH : IBV_WC_RETRY_EXC_ERR) && wc.wr_id == (uint64_t)i && wc.vendor_err, "%d: %s", i,
            ibv_wc_status_str(wc.status));
    }
    CHECK(state_of(&any) == ERR, "state");
    destroy_any(&any);
}

/* Inline data needs no key, and more of it than granted is refused. */
static void inline_data(void)
{
    struct any two[2];
    make_two(two, context, pd, RC);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr made;
    FAILS(ibv_query_qp(two[0].qp, &attr, 0, &made), 0);
    struct ibv_sge sge = piece(&two[0], 0, made.cap.max_inline_data + 1);
    sge.lkey ^= 1;
    struct ibv_send_wr wr = {.opcode = SEND, .send_flags = IBV_SEND_INLINE};
    FAILS(post_one(&two[0], &sge, wr), EINVAL);
    sge.length = made.cap.max_inline_data;
    FAILS(receive_one(&two[1], 1, piece(&two[1], 0, 4096)), 0);
    FAILS(post_one(&two[0], &sge, wr), 0);
    CHECK(next_wc(two[0].send_cq).status == OK && next_wc(two[1].recv_cq).byte_len == made.cap.max_inline_data, "inline");
    destroy_any(&two[0]);
    destroy_any(&two[1]);
}

int main(int argc, char **argv)
{
    static const struct { const char *name; void (*run)(void); } cases[] = {
        {"rc", rc}, {"uc", uc}, {"ud", ud}, {"nobody", nobody}, {"inline", inline_data},
    };
    alarm(60);
    context = open_device();
    pd = ibv_alloc_pd(context), other_pd = ibv_alloc_pd(context);
    CHECK(pd && other_pd, "alloc_pd: %s", strerror(errno));
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (argc == 2 && !strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            FAILS(ibv_dealloc_pd(other_pd), 0);
            FAILS(ibv_dealloc_pd(pd), 0);
            FAILS(ibv_close_device(context), 0);
            puts("ok");
            return 0;
        }
    die("usage: statuses CASE");
}
