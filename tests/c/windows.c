/* windows CASE: memory windows of both types, local and remote invalidation: every rule of binding, access and order. */
#include "verbs_pair.h"

#define LENGTH (64 * 1024)
#define FULL (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND)
#define WINDOW (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)

/* Side 1 has the windows and their memory, side 0 uses them. */
static struct side pair[2];
static unsigned char *from, *to;
static struct ibv_mr *from_mr, *to_mr;

#define FAILS(call, wanted) do { int rc_ = (call); CHECK(rc_ == (wanted), #call " gives %d, not %d", rc_, (wanted)); } while (0)
#define MAKES_NOTHING(call, wanted) do { errno = 0; CHECK(!(call), #call " succeeds"); \
    CHECK(errno == (wanted), #call " sets %s, not %s", strerror(errno), strerror(wanted)); } while (0)

static struct ibv_mr *reg_with(struct ibv_pd *pd, void *address, size_t length, int access)
{
    struct ibv_mr *mr = ibv_reg_mr(pd, address, length, access);
    CHECK(mr, "reg_mr: %s", strerror(errno));
    return mr;
}

static void start(void)
{
    make_pair(pair);
    from = aligned_alloc(4096, LENGTH);
    to = aligned_alloc(4096, LENGTH);
    memset(from, 'f', LENGTH);
    memset(to, 't', LENGTH);
    from_mr = reg(&pair[0], from, LENGTH);
    to_mr = reg_with(pair[1].pd, to, LENGTH, FULL);
}

/* Both QPs as new, connected again: after an error. */
static void again(void)
{
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
    for (int i = 0; i < 2; i++)
        CHECK(!ibv_modify_qp(pair[i].qp, &reset, IBV_QP_STATE), "to RESET");
    connect_side(&pair[0], &pair[1].address);
    connect_side(&pair[1], &pair[0].address);
}

static struct ibv_mw *window(enum ibv_mw_type type)
{
    struct ibv_mw *mw = ibv_alloc_mw(pair[1].pd, type);
    CHECK(mw, "alloc_mw: %s", strerror(errno));
    CHECK(mw->type == type && mw->pd == pair[1].pd && mw->context == pair[1].context, "struct ibv_mw");
    return mw;
}

static struct ibv_wc completion(struct side *side)
{
    time_t end = time(NULL) + 30;
    struct ibv_wc wc;
    int n;
    while ((n = ibv_poll_cq(side->cq, 1, &wc)) == 0)
        CHECK(time(NULL) < end, "no completion in 30 s");
    CHECK(n == 1, "poll_cq: %d", n);
    return wc;
}

static void expect(struct side *side, enum ibv_wc_status status, const char *what)
{
    struct ibv_wc wc = completion(side);
    CHECK(wc.status == status, "%s: %s, not %s", what, ibv_wc_status_str(wc.status), ibv_wc_status_str(status));
}

static struct ibv_mw_bind_info info_of(struct ibv_mr *mr, size_t offset, size_t length, unsigned access)
{
    return (struct ibv_mw_bind_info){.mr = mr, .addr = (uintptr_t)mr->addr + offset, .length = length, .mw_access_flags = access};
}

/* Posts the bind of a window of type 1. */
static int bind1(struct ibv_mw *mw, struct ibv_mw_bind_info info)
{
    struct ibv_mw_bind bind = {.wr_id = 1, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};
    return ibv_bind_mw(pair[1].qp, mw, &bind);
}

/* Posts the bind of a window of type 2 on a QP. */
static int bind2_on(struct ibv_qp *qp, struct ibv_mw *mw, uint32_t rkey, struct ibv_mw_bind_info info, unsigned flags)
{
    struct ibv_send_wr *bad, wr = {.wr_id = 2, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED | flags,
        .bind_mw = {.mw = mw, .rkey = rkey, .bind_info = info}};
    return ibv_post_send(qp, &wr, &bad);
}

static int bind2(struct ibv_mw *mw, uint32_t rkey, struct ibv_mw_bind_info info)
{
    return bind2_on(pair[1].qp, mw, rkey, info, 0);
}

/* A window of type 2, bound; its key is in mw->rkey. */
static struct ibv_mw *bound2(size_t offset, size_t length, unsigned access)
{
    struct ibv_mw *mw = window(IBV_MW_TYPE_2);
    mw->rkey = ibv_inc_rkey(mw->rkey);
    FAILS(bind2(mw, mw->rkey, info_of(to_mr, offset, length, access)), 0);
    expect(&pair[1], IBV_WC_SUCCESS, "bind");
    return mw;
}

static int invalidate(uint32_t key)
{
    struct ibv_send_wr *bad, wr = {.wr_id = 3, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = key};
    return ibv_post_send(pair[1].qp, &wr, &bad);
}

static int send_inv(uint32_t length, uint32_t key)
{
    struct ibv_sge sge = {.addr = (uintptr_t)from, .length = length, .lkey = from_mr->lkey};
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_INV, .invalidate_rkey = key};
    return ibv_post_send(pair[0].qp, &wr, &bad);
}

/* Posts a WRITE, READ or atomic of side 0. */
static void access_remote(enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t addr, uint32_t length)
{
    struct ibv_sge sge = {.addr = (uintptr_t)from, .length = length, .lkey = from_mr->lkey};
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode};
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
        wr.wr.atomic.remote_addr = addr, wr.wr.atomic.rkey = rkey, wr.wr.atomic.compare_add = 1;
    else
        wr.wr.rdma.remote_addr = addr, wr.wr.rdma.rkey = rkey;
    FAILS(ibv_post_send(pair[0].qp, &wr, &bad), 0);
}

static void allowed(enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t addr, uint32_t length, const char *what)
{
    access_remote(opcode, rkey, addr, length);
    expect(&pair[0], IBV_WC_SUCCESS, what);
}

static void refused(enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t addr, uint32_t length, const char *what)
{
    access_remote(opcode, rkey, addr, length);
    expect(&pair[0], IBV_WC_REM_ACCESS_ERR, what);
    again();
}

static uint64_t at(size_t offset)
{
    return (uintptr_t)to + offset;
}

static void attributes(void)
{
    start();
    struct ibv_device_attr attr;
    CHECK(!ibv_query_device(pair[0].context, &attr), "query_device");
    unsigned wanted = IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B | IBV_DEVICE_MEM_MGT_EXTENSIONS;
    CHECK(attr.max_mw > 0 && (attr.device_cap_flags & wanted) == wanted, "max_mw %d, flags %#x", attr.max_mw, attr.device_cap_flags);
    MAKES_NOTHING(ibv_alloc_mw(pair[1].pd, 0), EINVAL);
    MAKES_NOTHING(ibv_alloc_mw(pair[1].pd, 3), EINVAL);
    struct ibv_pd *pd = ibv_alloc_pd(pair[0].context);
    struct ibv_mw *one = ibv_alloc_mw(pd, IBV_MW_TYPE_1), *two = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    CHECK(one && two && one->rkey >> 8 != two->rkey >> 8, "alloc_mw");
    FAILS(ibv_dealloc_pd(pd), EBUSY);
    FAILS(ibv_dealloc_mw(one), 0);
    FAILS(ibv_dealloc_mw(two), 0);
    FAILS(ibv_dealloc_pd(pd), 0);
    FAILS(ibv_dereg_mr(from_mr), 0);
    FAILS(ibv_dereg_mr(to_mr), 0);
    destroy_pair(pair);
}

static void type_1(void)
{
    start();
    struct ibv_mw *mw = window(IBV_MW_TYPE_1);
    uint32_t first = mw->rkey;
    refused(IBV_WR_RDMA_WRITE, first, at(0), 1, "a window that is not bound");
    FAILS(bind1(mw, info_of(to_mr, 4096, 4096, WINDOW)), 0);
    CHECK(mw->rkey == ibv_inc_rkey(first), "the key is %#x after %#x", mw->rkey, first);
    struct ibv_wc wc = completion(&pair[1]);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW && wc.wr_id == 1 && wc.qp_num == pair[1].qp->qp_num, "completion");
    allowed(IBV_WR_RDMA_WRITE, mw->rkey, at(4096), 4096, "a write of all");
    CHECK(to[4095] == 't' && to[4096] == 'f' && to[8191] == 'f' && to[8192] == 't', "where it was written");
    memset(to + 4096, 'r', 4096);
    allowed(IBV_WR_RDMA_READ, mw->rkey, at(8191), 1, "a read of the last byte");
    CHECK(from[0] == 'r', "what was read");
    refused(IBV_WR_RDMA_WRITE, first, at(4096), 1, "the old key");
    refused(IBV_WR_RDMA_WRITE, mw->rkey, at(4095), 2, "a byte in front");
    refused(IBV_WR_RDMA_WRITE, mw->rkey, at(8191), 2, "a byte behind");
    refused(IBV_WR_RDMA_WRITE, to_mr->rkey, at(4096), 1, "the region, which has no remote rights");
    FAILS(ibv_dereg_mr(to_mr), EBUSY);
    CHECK(ibv_rereg_mr(to_mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, FULL) && errno == EBUSY,
        "a region with a window is registered again: %s", strerror(errno));
    allowed(IBV_WR_RDMA_WRITE, mw->rkey, at(4096), 1, "the window, after that");

    /* It moves by a bind, at once. */
    uint32_t second = mw->rkey;
    FAILS(bind1(mw, info_of(to_mr, 0, 1, IBV_ACCESS_REMOTE_READ)), 0);
    expect(&pair[1], IBV_WC_SUCCESS, "bind again");
    allowed(IBV_WR_RDMA_READ, mw->rkey, at(0), 1, "its new place");
    refused(IBV_WR_RDMA_WRITE, mw->rkey, at(0), 1, "a right that is gone");
    refused(IBV_WR_RDMA_READ, second, at(4096), 1, "its old place");

    /* A bind to no bytes ends it, with a region or without. */
    FAILS(bind1(mw, info_of(to_mr, 0, 0, 0)), 0);
    expect(&pair[1], IBV_WC_SUCCESS, "unbind");
    refused(IBV_WR_RDMA_READ, mw->rkey, at(0), 1, "after the unbind");
    FAILS(bind1(mw, (struct ibv_mw_bind_info){0}), 0);
    expect(&pair[1], IBV_WC_SUCCESS, "unbind without a region");
    FAILS(ibv_dereg_mr(to_mr), 0);

    /* Any QP of its PD reaches it, and it outlives the QP that bound it. */
    to_mr = reg_with(pair[1].pd, to, LENGTH, FULL);
    struct side other = make_side(pair[1].context, pair[1].pd), own = pair[1];
    FAILS(bind1(mw, info_of(to_mr, 0, 64, WINDOW)), 0);
    expect(&pair[1], IBV_WC_SUCCESS, "bind");
    pair[1] = other;
    again();
    allowed(IBV_WR_RDMA_WRITE, mw->rkey, at(0), 64, "another QP");
    FAILS(ibv_destroy_qp(own.qp), 0);
    allowed(IBV_WR_RDMA_WRITE, mw->rkey, at(0), 64, "after its QP is destroyed");
    FAILS(ibv_dereg_mr(to_mr), EBUSY);
    FAILS(ibv_dealloc_mw(mw), 0);
    FAILS(ibv_dereg_mr(to_mr), 0);
}

static void type_2(void)
{
    start();
    struct ibv_mw *mw = window(IBV_MW_TYPE_2);
    uint32_t first = mw->rkey, key = ibv_inc_rkey(first);
    refused(IBV_WR_RDMA_WRITE, first, at(0), 1, "a window that is not bound");
    FAILS(bind2(mw, key, info_of(to_mr, 4096, 4096, WINDOW)), 0);
    struct ibv_wc wc = completion(&pair[1]);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW && wc.wr_id == 2, "completion");
    allowed(IBV_WR_RDMA_WRITE, key, at(4096), 4096, "a write of all");
    refused(IBV_WR_RDMA_WRITE, first, at(4096), 1, "the key before the bind");
    refused(IBV_WR_RDMA_READ, key, at(8191), 2, "a byte behind");
    FAILS(ibv_dereg_mr(to_mr), EBUSY);

    /* Only the QP by which it was bound reaches it. */
    struct side other = make_side(pair[1].context, pair[1].pd), own = pair[1];
    pair[1] = other;
    again();
    refused(IBV_WR_RDMA_WRITE, key, at(4096), 1, "another QP");
    FAILS(invalidate(key), 0);
    expect(&pair[1], IBV_WC_MW_BIND_ERR, "invalidation on another QP");
    FAILS(ibv_destroy_qp(pair[1].qp), 0);
    pair[1] = own;
    again();
    allowed(IBV_WR_RDMA_WRITE, key, at(4096), 1, "its own QP");

    /* Bound again only after an invalidation; the tag of the new key is the program's, the rest is the window's. */
    FAILS(invalidate(key), 0);
    wc = completion(&pair[1]);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_LOCAL_INV && wc.wr_id == 3, "completion of the invalidation");
    refused(IBV_WR_RDMA_WRITE, key, at(4096), 1, "the key after its invalidation");
    FAILS(bind2(mw, 0x5a, info_of(to_mr, 0, 64, WINDOW)), 0);
    expect(&pair[1], IBV_WC_SUCCESS, "bind again");
    uint32_t chosen = (first & ~0xffu) | 0x5a;
    allowed(IBV_WR_RDMA_WRITE, chosen, at(0), 64, "under the tag chosen");
    FAILS(bind2(mw, 0x5b, info_of(to_mr, 0, 64, WINDOW)), 0);
    expect(&pair[1], IBV_WC_MW_BIND_ERR, "a bind while it is bound");
    again();
    allowed(IBV_WR_RDMA_WRITE, chosen, at(0), 64, "the bind before, after one that failed");

    /* Keys that can't be invalidated. */
    uint32_t wrong[] = {chosen ^ 1, chosen ^ 0x100, to_mr->rkey, from_mr->rkey, 0};
    for (int i = 0; i < 5; i++) {
        FAILS(invalidate(wrong[i]), 0);
        FAILS(invalidate(chosen), 0);
        expect(&pair[1], IBV_WC_MW_BIND_ERR, "invalidation of a wrong key");
        expect(&pair[1], IBV_WC_WR_FLUSH_ERR, "what follows it");
        struct ibv_qp_attr attr;
        struct ibv_qp_init_attr init;
        CHECK(!ibv_query_qp(pair[1].qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_ERR, "the QP is not in ERR");
        again();
    }
    allowed(IBV_WR_RDMA_WRITE, chosen, at(0), 64, "it is still bound");

    /* Its binding ends with its QP, and so does what keeps the region. */
    FAILS(ibv_dereg_mr(to_mr), EBUSY);
    FAILS(ibv_destroy_qp(pair[1].qp), 0);
    FAILS(ibv_dereg_mr(to_mr), 0);
    FAILS(ibv_dealloc_mw(mw), 0);
}

/* Rights, one by one. */
static void rights(void)
{
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD};
    static const unsigned right[] = {IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_ATOMIC};
    start();
    for (int mine = 0; mine < 3; mine++) {
        struct ibv_mw *mw = bound2(0, 4096, right[mine]);
        for (int asked = 0; asked < 3; asked++) {
            char what[32];
            snprintf(what, sizeof(what), "right %d, request %d", mine, asked);
            if (asked == mine)
                allowed(opcodes[asked], mw->rkey, at(64), 8, what);
            else
                refused(opcodes[asked], mw->rkey, at(64), 8, what);
        }
        uint32_t key = mw->rkey;
        FAILS(ibv_dealloc_mw(mw), 0);
        refused(opcodes[mine], key, at(64), 8, "a window that is deallocated");
    }
    /* The region's own remote rights are no matter of the window's. */
    struct ibv_mr *open = reg_with(pair[1].pd, to, LENGTH, FULL | WINDOW);
    struct ibv_mw *mw = window(IBV_MW_TYPE_2);
    FAILS(bind2(mw, mw->rkey, info_of(open, 0, 64, IBV_ACCESS_LOCAL_WRITE)), 0);
    expect(&pair[1], IBV_WC_SUCCESS, "bind without remote rights");
    refused(IBV_WR_RDMA_WRITE, mw->rkey, at(0), 1, "a window without rights");
    allowed(IBV_WR_RDMA_WRITE, open->rkey, at(0), 1, "the region");
}

/* Binds that fail when they are done. */
static void bad_binds(void)
{
    start();
    struct ibv_pd *pd = ibv_alloc_pd(pair[0].context);
    struct ibv_mr *closed = reg_with(pair[1].pd, to, LENGTH, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_mr *read_only = reg_with(pair[1].pd, to, LENGTH, IBV_ACCESS_MW_BIND);
    struct ibv_mr *elsewhere = reg_with(pd, to, LENGTH, FULL);
    struct ibv_mr gone = *closed;
    gone.lkey ^= 1;
    struct { struct ibv_mr *mr; size_t offset, length; unsigned access; const char *what; } bad[] = {
        {closed, 0, 64, IBV_ACCESS_REMOTE_READ, "a region without IBV_ACCESS_MW_BIND"},
        {read_only, 0, 64, IBV_ACCESS_REMOTE_WRITE, "remote write without local write"},
        {read_only, 0, 64, IBV_ACCESS_REMOTE_ATOMIC, "remote atomics without local write"},
        {to_mr, 1, LENGTH, IBV_ACCESS_REMOTE_READ, "a byte behind the region"},
        {to_mr, (size_t)-1, 2, IBV_ACCESS_REMOTE_READ, "a byte in front of the region"},
        {to_mr, 1, (size_t)-1, IBV_ACCESS_REMOTE_READ, "a range that wraps around"},
    };
    for (int type = 1; type <= 2; type++)
        for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
            struct ibv_mw *mw = window(type);
            struct ibv_mw_bind_info info = info_of(bad[i].mr, bad[i].offset, bad[i].length, bad[i].access);
            uint32_t old = mw->rkey;
            FAILS(type == 1 ? bind1(mw, info) : bind2(mw, mw->rkey, info), 0);
            expect(&pair[1], IBV_WC_MW_BIND_ERR, bad[i].what);
            struct ibv_qp_attr attr;
            struct ibv_qp_init_attr init;
            CHECK(!ibv_query_qp(pair[1].qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_ERR, "the QP is not in ERR");
            again();
            refused(IBV_WR_RDMA_READ, old, at(0), 1, "the window of a bind that failed");
            FAILS(ibv_dealloc_mw(mw), 0);
        }
    /* To read no right to write is needed. */
    struct ibv_mw *mw = window(IBV_MW_TYPE_2);
    FAILS(bind2(mw, mw->rkey, info_of(read_only, 0, 64, IBV_ACCESS_REMOTE_READ)), 0);
    expect(&pair[1], IBV_WC_SUCCESS, "bind for reading");
    /* Domains: of the region, and of the window. */
    mw = window(IBV_MW_TYPE_2);
    FAILS(bind2(mw, mw->rkey, info_of(elsewhere, 0, 64, WINDOW)), 0);
    expect(&pair[1], IBV_WC_MW_BIND_ERR, "a region of another PD");
    again();
    mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    CHECK(mw, "alloc_mw");
    FAILS(bind2(mw, mw->rkey, info_of(elsewhere, 0, 64, WINDOW)), 0);
    expect(&pair[1], IBV_WC_MW_BIND_ERR, "a QP of another PD");
    again();
    mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
    CHECK(mw, "alloc_mw");
    FAILS(bind1(mw, info_of(elsewhere, 0, 64, WINDOW)), 0);
    expect(&pair[1], IBV_WC_MW_BIND_ERR, "a QP of another PD, type 1");
    again();
    mw = window(IBV_MW_TYPE_2);
    FAILS(bind2(mw, mw->rkey, (struct ibv_mw_bind_info){&gone, at(0), 64, WINDOW}), 0);
    expect(&pair[1], IBV_WC_MW_BIND_ERR, "a region that does not exist");
}

/* Binds that are not taken at all. */
static void misuse(void)
{
    start();
    struct ibv_pd *pd = ibv_alloc_pd(pair[0].context);
    struct ibv_mr *elsewhere = reg_with(pd, to, LENGTH, FULL);
    struct ibv_mw *one = window(IBV_MW_TYPE_1), *two = window(IBV_MW_TYPE_2);
    uint32_t key = one->rkey;
    struct ibv_mw_bind_info good = info_of(to_mr, 0, 64, WINDOW), zero = good, unknown = good, none = {.addr = 1};
    zero.mw_access_flags |= IBV_ACCESS_ZERO_BASED;
    unknown.mw_access_flags |= IBV_ACCESS_MW_BIND;
    FAILS(bind1(two, good), EINVAL);
    FAILS(bind1(one, zero), EINVAL);
    FAILS(bind1(one, unknown), EINVAL);
    FAILS(bind1(one, none), EINVAL);
    FAILS(bind1(one, info_of(elsewhere, 0, 64, WINDOW)), EPERM);
    CHECK(one->rkey == key, "a bind that is not taken changes the key");
    FAILS(bind2(one, key, good), EINVAL);
    FAILS(bind2(NULL, key, good), EINVAL);
    FAILS(bind2(two, two->rkey, unknown), EINVAL);
    FAILS(bind2(two, two->rkey, none), EINVAL);
    FAILS(bind2(two, two->rkey, info_of(to_mr, 0, 0, 0)), EINVAL);
    struct ibv_context *other = open_device();
    struct ibv_pd *others_pd = ibv_alloc_pd(other);
    CHECK(others_pd, "alloc_pd: %s", strerror(errno));
    struct ibv_mr *others_mr = reg_with(others_pd, to, LENGTH, FULL);
    struct ibv_mw *others = ibv_alloc_mw(others_pd, IBV_MW_TYPE_2);
    CHECK(others, "alloc_mw: %s", strerror(errno));
    FAILS(bind2(others, others->rkey, good), EINVAL);
    FAILS(bind2(two, two->rkey, info_of(others_mr, 0, 64, WINDOW)), EINVAL);
    FAILS(ibv_dealloc_mw(others), 0);
    FAILS(ibv_dereg_mr(others_mr), 0);
    FAILS(ibv_dealloc_pd(others_pd), 0);
    FAILS(ibv_close_device(other), 0);
    struct ibv_mr *null = ibv_alloc_null_mr(pair[1].pd), *from_zero = reg_with(pair[1].pd, to, LENGTH, FULL | IBV_ACCESS_ZERO_BASED);
    CHECK(null, "alloc_null_mr: %s", strerror(errno));
    FAILS(bind1(one, (struct ibv_mw_bind_info){null, 0, 64, WINDOW}), EOPNOTSUPP);
    FAILS(bind2(two, two->rkey, (struct ibv_mw_bind_info){null, 0, 64, WINDOW}), EOPNOTSUPP);
    FAILS(bind1(one, (struct ibv_mw_bind_info){from_zero, 0, 64, WINDOW}), EINVAL);

    struct ibv_qp_init_attr init = {.send_cq = pair[1].cq, .recv_cq = pair[1].cq, .qp_type = IBV_QPT_UD,
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *ud = ibv_create_qp(pair[1].pd, &init);
    CHECK(ud, "create_qp: %s", strerror(errno));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 1};
    CHECK(!ibv_modify_qp(ud, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "to INIT");
    attr.qp_state = IBV_QPS_RTR;
    CHECK(!ibv_modify_qp(ud, &attr, IBV_QP_STATE), "to RTR");
    attr.qp_state = IBV_QPS_RTS;
    CHECK(!ibv_modify_qp(ud, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "to RTS");
    FAILS(bind2_on(ud, two, two->rkey, good, 0), EINVAL);
    struct ibv_send_wr *bad, wr = {.opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = two->rkey};
    FAILS(ibv_post_send(ud, &wr, &bad), EINVAL);
    struct ibv_mw_bind bind = {.bind_info = good};
    FAILS(ibv_bind_mw(ud, one, &bind), EINVAL);

    /* In ERR they flush like any work. */
    attr.qp_state = IBV_QPS_ERR;
    CHECK(!ibv_modify_qp(pair[1].qp, &attr, IBV_QP_STATE), "to ERR");
    FAILS(bind2(two, two->rkey, good), 0);
    expect(&pair[1], IBV_WC_WR_FLUSH_ERR, "a bind in ERR");
    again();
    /* What is full takes no more. */
    struct ibv_qp_attr drain = {.qp_state = IBV_QPS_SQD};
    CHECK(!ibv_modify_qp(pair[1].qp, &drain, IBV_QP_STATE), "to SQD");
    for (int i = 0; i < DEPTH; i++)
        FAILS(bind1(one, good), 0);
    FAILS(bind1(one, good), ENOMEM);
    drain.qp_state = IBV_QPS_RTS;
    CHECK(!ibv_modify_qp(pair[1].qp, &drain, IBV_QP_STATE), "to RTS");
    for (int i = 0; i < DEPTH; i++)
        expect(&pair[1], IBV_WC_SUCCESS, "a bind that waited for the end of SQD");
    allowed(IBV_WR_RDMA_WRITE, one->rkey, at(0), 64, "the last of them");
}

static void send_with_invalidate(void)
{
    start();
    uint32_t lengths[] = {0, 1, 1024, 5000};
    for (int i = 0; i < 4; i++) {
        struct ibv_mw *mw = bound2(0, LENGTH, WINDOW);
        memset(to, 't', LENGTH);
        CHECK(!receive_into(&pair[1], to, LENGTH, to_mr), "post_recv");
        FAILS(send_inv(lengths[i], mw->rkey), 0);
        struct ibv_wc wc = completion(&pair[1]);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.byte_len == lengths[i], "receive: %s of %u bytes",
            ibv_wc_status_str(wc.status), wc.byte_len);
        CHECK(wc.wc_flags == IBV_WC_WITH_INV && wc.invalidated_rkey == mw->rkey, "flags %#x, key %#x", wc.wc_flags, wc.invalidated_rkey);
        CHECK(!lengths[i] || to[lengths[i] - 1] == 'f', "the data");
        wc = completion(&pair[0]);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_SEND, "send: %s", ibv_wc_status_str(wc.status));
        refused(IBV_WR_RDMA_READ, mw->rkey, at(0), 1, "the key that the peer gave back");
        FAILS(bind2(mw, mw->rkey, info_of(to_mr, 0, 64, WINDOW)), 0);
        expect(&pair[1], IBV_WC_SUCCESS, "bind after a remote invalidation");
        FAILS(ibv_dealloc_mw(mw), 0);
    }

    /* What the peer may not invalidate: wrong keys, a window of type 1, windows of other QPs, regions. */
    struct ibv_mw *mw = bound2(0, 64, WINDOW), *one = window(IBV_MW_TYPE_1);
    FAILS(bind1(one, info_of(to_mr, 0, 64, WINDOW)), 0);
    expect(&pair[1], IBV_WC_SUCCESS, "bind");
    struct ibv_mr *open = reg_with(pair[1].pd, to, LENGTH, FULL | WINDOW);
    uint32_t wrong[] = {mw->rkey ^ 1, mw->rkey ^ 0x100, one->rkey, open->rkey, 0};
    for (int i = 0; i < 5; i++) {
        CHECK(!receive_into(&pair[1], to, LENGTH, to_mr), "post_recv");
        CHECK(!receive_into(&pair[1], to, LENGTH, to_mr), "post_recv");
        FAILS(send_inv(64, wrong[i]), 0);
        expect(&pair[0], IBV_WC_REM_ACCESS_ERR, "send of a wrong key");
        expect(&pair[1], IBV_WC_REM_INV_REQ_ERR, "its receive");
        expect(&pair[1], IBV_WC_WR_FLUSH_ERR, "the next receive");
        struct ibv_qp_attr attr;
        struct ibv_qp_init_attr init;
        CHECK(!ibv_query_qp(pair[1].qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_ERR, "the QP is not in ERR");
        again();
    }
    allowed(IBV_WR_RDMA_READ, open->rkey, at(0), 64, "the region");
    allowed(IBV_WR_RDMA_READ, mw->rkey, at(0), 64, "the window");
    allowed(IBV_WR_RDMA_READ, one->rkey, at(0), 64, "the window of type 1");
}

/* Local work keeps its place among the requests of its queue. */
static void order(void)
{
    start();
    /* One list: a bind, the message that tells the key, an invalidation, a message. */
    struct ibv_mw *mw = window(IBV_MW_TYPE_2);
    struct ibv_sge sge = {.addr = at(0), .length = 64, .lkey = to_mr->lkey};
    struct ibv_send_wr *bad, list[] = {
        {.wr_id = 0, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND},
        {.wr_id = 1, .opcode = IBV_WR_BIND_MW, .bind_mw = {mw, mw->rkey, info_of(to_mr, 0, LENGTH, WINDOW)}},
        {.wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND},
        {.wr_id = 3, .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = mw->rkey},
        {.wr_id = 4, .opcode = IBV_WR_BIND_MW, .bind_mw = {mw, mw->rkey, info_of(to_mr, 0, 64, WINDOW)}},
        {.wr_id = 5, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND},
    };
    for (int i = 0; i < 5; i++)
        list[i].next = &list[i + 1];
    for (int i = 0; i < 3; i++)
        CHECK(!receive_into(&pair[0], from, 64, from_mr), "post_recv");
    FAILS(ibv_post_send(pair[1].qp, list, &bad), 0);
    static const enum ibv_wc_opcode opcodes[] = {IBV_WC_SEND, IBV_WC_BIND_MW, IBV_WC_SEND, IBV_WC_LOCAL_INV, IBV_WC_BIND_MW, IBV_WC_SEND};
    for (unsigned i = 0; i < 6; i++) { /* the QPs signal all */
        struct ibv_wc wc = completion(&pair[1]);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == i && wc.opcode == opcodes[i], "completion %u: request %d, %s", i,
            (int)wc.wr_id, ibv_wc_status_str(wc.status));
    }
    for (int i = 0; i < 3; i++)
        expect(&pair[0], IBV_WC_SUCCESS, "receive");
    FAILS(invalidate(mw->rkey), 0);
    expect(&pair[1], IBV_WC_SUCCESS, "invalidation");

    /* A fenced bind behind READs of the memory that it opens. */
    struct ibv_mr *open = reg_with(pair[0].pd, from, LENGTH, IBV_ACCESS_REMOTE_READ);
    sge.length = LENGTH;
    struct ibv_send_wr read = {.wr_id = 7, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
        .wr.rdma = {.remote_addr = (uintptr_t)from, .rkey = open->rkey}};
    for (int i = 0; i < 8; i++)
        FAILS(ibv_post_send(pair[1].qp, &read, &bad), 0);
    FAILS(bind2_on(pair[1].qp, mw, mw->rkey, info_of(to_mr, 0, LENGTH, WINDOW), IBV_SEND_FENCE), 0);
    for (int i = 0; i < 8; i++) {
        struct ibv_wc wc = completion(&pair[1]);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == 7, "read: %s", ibv_wc_status_str(wc.status));
    }
    struct ibv_wc wc = completion(&pair[1]);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW, "fenced bind");

    /* After the completion of an invalidation nothing more is written by its key. */
    for (int round = 0; round < 20; round++) {
        memset(to, 0, LENGTH);
        for (int i = 0; i < 16; i++)
            access_remote(IBV_WR_RDMA_WRITE, mw->rkey, at(0), LENGTH);
        int before = round < 16 ? round : 16, failed = 0;
        for (int i = 0; i < before; i++)
            expect(&pair[0], IBV_WC_SUCCESS, "write before the invalidation");
        FAILS(invalidate(mw->rkey), 0);
        expect(&pair[1], IBV_WC_SUCCESS, "invalidation");
        unsigned char *then = malloc(LENGTH);
        memcpy(then, to, LENGTH);
        memset(from, round + 1, LENGTH);
        for (int i = before; i < 16; i++) {
            wc = completion(&pair[0]);
            CHECK(failed ? wc.status == IBV_WC_WR_FLUSH_ERR : wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_REM_ACCESS_ERR,
                "write %d: %s", i, ibv_wc_status_str(wc.status));
            failed |= wc.status != IBV_WC_SUCCESS;
        }
        CHECK(!memcmp(then, to, LENGTH), "something was written after the invalidation");
        free(then);
        again();
        mw->rkey = ibv_inc_rkey(mw->rkey);
        FAILS(bind2(mw, mw->rkey, info_of(to_mr, 0, LENGTH, WINDOW)), 0);
        expect(&pair[1], IBV_WC_SUCCESS, "bind");
    }
}

/* Peers name the start of a zero-based window by 0. */
static void zero_based(void)
{
    start();
    struct ibv_mw *mw = bound2(4096, 4096, WINDOW | IBV_ACCESS_ZERO_BASED);
    allowed(IBV_WR_RDMA_WRITE, mw->rkey, 0, 4096, "all of it");
    CHECK(to[4095] == 't' && to[4096] == 'f' && to[8191] == 'f' && to[8192] == 't', "where it was written");
    allowed(IBV_WR_RDMA_READ, mw->rkey, 4095, 1, "the last byte");
    refused(IBV_WR_RDMA_READ, mw->rkey, 4095, 2, "a byte behind");
    refused(IBV_WR_RDMA_READ, mw->rkey, at(4096), 1, "the address");
    /* The address of a bind is in the terms of the region. */
    struct ibv_mr *mr = reg_with(pair[1].pd, to, LENGTH, FULL | IBV_ACCESS_ZERO_BASED);
    mw = window(IBV_MW_TYPE_2);
    FAILS(bind2(mw, mw->rkey, (struct ibv_mw_bind_info){mr, 8192, 64, WINDOW}), 0);
    expect(&pair[1], IBV_WC_SUCCESS, "bind to a zero-based region");
    allowed(IBV_WR_RDMA_WRITE, mw->rkey, 8192, 64, "a window of a zero-based region");
    CHECK(to[8192] == 'f' && to[8255] == 'f' && to[8256] == 't', "where it was written");
    refused(IBV_WR_RDMA_WRITE, mw->rkey, 8191, 1, "a byte in front of it");
}

/* UC has windows too. */
static void unreliable(void)
{
    start();
    for (int i = 0; i < 2; i++) {
        CHECK(!ibv_destroy_qp(pair[i].qp), "destroy_qp");
        struct ibv_qp_init_attr init = {.send_cq = pair[i].cq, .recv_cq = pair[i].cq, .qp_type = IBV_QPT_UC, .sq_sig_all = 1,
            .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1}};
        pair[i].qp = ibv_create_qp(pair[i].pd, &init);
        CHECK(pair[i].qp, "create_qp: %s", strerror(errno));
        pair[i].address.qpn = pair[i].qp->qp_num;
    }
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
        CHECK(!ibv_modify_qp(pair[i].qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "to INIT");
        attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = pair[!i].address.qpn,
            .rq_psn = 7, .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = pair[!i].address.gid, .hop_limit = 1}}};
        CHECK(!ibv_modify_qp(pair[i].qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN), "to RTR");
        attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .sq_psn = 7};
        CHECK(!ibv_modify_qp(pair[i].qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "to RTS");
    }
    for (int type = 1; type <= 2; type++) {
        struct ibv_mw *mw = window(type);
        struct ibv_mw_bind_info info = info_of(to_mr, 0, 4096, IBV_ACCESS_REMOTE_WRITE);
        FAILS(type == 1 ? bind1(mw, info) : bind2(mw, mw->rkey, info), 0);
        expect(&pair[1], IBV_WC_SUCCESS, "bind");
        memset(to, 't', LENGTH);
        /* A write with immediate data tells that it has come; one that is refused does not. */
        for (int i = 0; i < 2; i++) {
            CHECK(!receive_into(&pair[1], to, 0, to_mr), "post_recv");
            struct ibv_sge sge = {.addr = (uintptr_t)from, .length = 64, .lkey = from_mr->lkey};
            struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
                .wr.rdma = {.remote_addr = at(i ? 8192 : 0), .rkey = mw->rkey}};
            FAILS(ibv_post_send(pair[0].qp, &wr, &bad), 0);
            expect(&pair[0], IBV_WC_SUCCESS, "write");
            if (i == 0)
                expect(&pair[1], IBV_WC_SUCCESS, "what it tells");
        }
        struct ibv_sge sge = {.addr = (uintptr_t)from, .length = 0, .lkey = from_mr->lkey};
        struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND};
        FAILS(ibv_post_send(pair[0].qp, &wr, &bad), 0);
        expect(&pair[0], IBV_WC_SUCCESS, "send");
        struct ibv_wc wc = completion(&pair[1]);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV, "the write outside the window arrived");
        CHECK(to[63] == 'f' && to[64] == 't' && to[8192] == 't', "what was written");
        if (type == 2) {
            FAILS(invalidate(mw->rkey), 0);
            expect(&pair[1], IBV_WC_SUCCESS, "invalidation");
        }
    }
    struct ibv_send_wr *bad, wr = {.opcode = IBV_WR_SEND_WITH_INV};
    FAILS(ibv_post_send(pair[0].qp, &wr, &bad), EINVAL);
    FAILS(invalidate(1), 0);
    expect(&pair[1], IBV_WC_MW_BIND_ERR, "invalidation of a wrong key");
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    CHECK(!ibv_query_qp(pair[1].qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_SQE, "the QP is not in SQE");
}

/* The same by ibv_wr_*, and completions by the extended CQ. */
static void extended(void)
{
    start();
    struct ibv_cq_init_attr_ex cq_attr = {.cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS};
    struct ibv_cq_ex *cq = ibv_create_cq_ex(pair[0].context, &cq_attr);
    CHECK(cq, "create_cq_ex: %s", strerror(errno));
    struct ibv_qp_ex *ex[2];
    for (int i = 0; i < 2; i++) {
        CHECK(!ibv_destroy_qp(pair[i].qp), "destroy_qp");
        struct ibv_cq *receive = i ? ibv_cq_ex_to_cq(cq) : pair[i].cq;
        struct ibv_qp_init_attr_ex init = {.send_cq = pair[i].cq, .recv_cq = receive, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
            .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64},
            .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .pd = pair[i].pd,
            .send_ops_flags = IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND |
                IBV_QP_EX_WITH_RDMA_WRITE};
        pair[i].qp = ibv_create_qp_ex(pair[i].context, &init);
        CHECK(pair[i].qp, "create_qp_ex: %s", strerror(errno));
        pair[i].address.qpn = pair[i].qp->qp_num;
        ex[i] = ibv_qp_to_qp_ex(pair[i].qp);
    }
    again();
    struct ibv_qp_init_attr_ex ud = {.send_cq = pair[0].cq, .recv_cq = pair[0].cq, .qp_type = IBV_QPT_UD, .pd = pair[0].pd,
        .cap = {.max_send_wr = 8}, .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .send_ops_flags = IBV_QP_EX_WITH_BIND_MW};
    MAKES_NOTHING(ibv_create_qp_ex(pair[0].context, &ud), EOPNOTSUPP);

    struct ibv_mw *mw = window(IBV_MW_TYPE_2), *one = window(IBV_MW_TYPE_1);
    struct ibv_mw_bind_info info = info_of(to_mr, 0, 4096, WINDOW);
    /* Not of this type: nothing of the batch is posted. */
    ibv_wr_start(ex[1]);
    ibv_wr_bind_mw(ex[1], one, one->rkey, &info);
    FAILS(ibv_wr_complete(ex[1]), EINVAL);
    /* Bound, invalidated, bound again, in one batch. */
    ibv_wr_start(ex[1]);
    ex[1]->wr_id = 1;
    ibv_wr_bind_mw(ex[1], mw, mw->rkey, &info);
    ex[1]->wr_id = 2;
    ibv_wr_local_inv(ex[1], mw->rkey);
    ex[1]->wr_id = 3;
    mw->rkey = ibv_inc_rkey(mw->rkey);
    ibv_wr_bind_mw(ex[1], mw, mw->rkey, &info);
    FAILS(ibv_wr_complete(ex[1]), 0);
    static const enum ibv_wc_opcode opcodes[] = {IBV_WC_BIND_MW, IBV_WC_LOCAL_INV, IBV_WC_BIND_MW};
    for (unsigned i = 0; i < 3; i++) {
        struct ibv_wc wc = completion(&pair[1]);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == i + 1 && wc.opcode == opcodes[i], "completion %u", i);
    }
    CHECK(!receive_into(&pair[1], to, LENGTH, to_mr), "post_recv");
    ibv_wr_start(ex[0]);
    ex[0]->wr_id = 4;
    ibv_wr_rdma_write(ex[0], mw->rkey, at(64));
    ibv_wr_set_sge(ex[0], from_mr->lkey, (uintptr_t)from, 64);
    ex[0]->wr_id = 5;
    ibv_wr_send_inv(ex[0], mw->rkey);
    ibv_wr_set_inline_data(ex[0], "inline", 6);
    FAILS(ibv_wr_complete(ex[0]), 0);
    expect(&pair[0], IBV_WC_SUCCESS, "write");
    expect(&pair[0], IBV_WC_SUCCESS, "send");
    struct ibv_poll_cq_attr poll_attr = {0};
    time_t end = time(NULL) + 30;
    int rc;
    while ((rc = ibv_start_poll(cq, &poll_attr)) == ENOENT)
        CHECK(time(NULL) < end, "no completion");
    CHECK(!rc && cq->status == IBV_WC_SUCCESS, "receive: %d", rc);
    CHECK(ibv_wc_read_opcode(cq) == IBV_WC_RECV && ibv_wc_read_byte_len(cq) == 6, "opcode and length");
    CHECK(ibv_wc_read_wc_flags(cq) & IBV_WC_WITH_INV && ibv_wc_read_invalidated_rkey(cq) == mw->rkey, "the key");
    ibv_end_poll(cq);
    CHECK(!memcmp(to, "inline", 6) && to[64] == 'f' && to[127] == 'f', "the data");
    ibv_wr_start(ex[0]);
    ibv_wr_rdma_write(ex[0], mw->rkey, at(64));
    ibv_wr_set_sge(ex[0], from_mr->lkey, (uintptr_t)from, 64);
    FAILS(ibv_wr_complete(ex[0]), 0);
    expect(&pair[0], IBV_WC_REM_ACCESS_ERR, "write after the invalidation");
}

int main(int argc, char **argv)
{
    static const struct { const char *name; void (*run)(void); } cases[] = {
        {"attributes", attributes}, {"type-1", type_1}, {"type-2", type_2}, {"rights", rights}, {"bad-binds", bad_binds},
        {"misuse", misuse}, {"send-with-invalidate", send_with_invalidate}, {"order", order}, {"zero-based", zero_based},
        {"unreliable", unreliable}, {"extended", extended},
    };
    alarm(60);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (argc == 2 && !strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            puts("ok");
            return 0;
        }
    die("usage: windows CASE");
}
