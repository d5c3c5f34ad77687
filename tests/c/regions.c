/* regions CASE: memory regions of every kind (rights, addresses, null, on demand, device memory, DMA buffers), what
 * changes in them, and the domains that they and other objects are made in. */
#define _GNU_SOURCE
#include "verbs_pair.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define PAGE 4096ul
#define LENGTH (4 * PAGE)
#define ALL (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

static struct side pair[2];
static unsigned char *from, *to;
static struct ibv_mr *from_mr, *to_mr;

#define FAILS(call, wanted) do { int rc_ = (call); CHECK(rc_ == (wanted), #call " gives %d, not %d", rc_, (wanted)); } while (0)
#define MAKES_NOTHING(call, wanted) do { errno = 0; CHECK(!(call), #call " succeeds"); \
    CHECK(errno == (wanted), #call " sets %s, not %s", strerror(errno), strerror(wanted)); } while (0)

static void *pages(size_t length, int protection)
{
    void *at = mmap(NULL, length, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED, "mmap: %s", strerror(errno));
    return at;
}

/* Peers may do all that RC can, on the queue pair. */
static void allow_all(void)
{
    struct ibv_qp_attr attr = {.qp_access_flags = ALL};
    for (int i = 0; i < 2; i++)
        CHECK(!ibv_modify_qp(pair[i].qp, &attr, IBV_QP_ACCESS_FLAGS), "modify_qp: %s", strerror(errno));
}

static void start(void)
{
    make_pair(pair);
    allow_all();
    from = pages(LENGTH, PROT_READ | PROT_WRITE);
    to = pages(LENGTH, PROT_READ | PROT_WRITE);
    for (size_t i = 0; i < LENGTH; i++)
        from[i] = (unsigned char)(i * 7 + i / 251);
    from_mr = ibv_reg_mr(pair[0].pd, from, LENGTH, ALL);
    to_mr = ibv_reg_mr(pair[1].pd, to, LENGTH, ALL);
    CHECK(from_mr && to_mr, "reg_mr: %s", strerror(errno));
}

/* Takes both queue pairs out of ERR. */
static void again(void)
{
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
    struct ibv_wc wc;
    for (int i = 0; i < 2; i++) {
        CHECK(!ibv_modify_qp(pair[i].qp, &reset, IBV_QP_STATE), "to RESET");
        while (ibv_poll_cq(pair[i].cq, 1, &wc) > 0)
            ;
    }
    connect_side(&pair[0], &pair[1].address);
    connect_side(&pair[1], &pair[0].address);
    allow_all();
}

/* One RDMA operation of pair[0]: its status. */
static enum ibv_wc_status rdma(enum ibv_wr_opcode opcode, uint64_t local, uint32_t lkey, uint64_t remote, uint32_t rkey, uint32_t length)
{
    struct ibv_sge sge = {.addr = local, .length = length, .lkey = lkey};
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .wr.rdma = {.remote_addr = remote, .rkey = rkey}};
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = remote;
        wr.wr.atomic.rkey = rkey;
        wr.wr.atomic.compare_add = 1;
    }
    int rc = ibv_post_send(pair[0].qp, &wr, &bad);
    CHECK(!rc, "post_send: %s", strerror(rc));
    return next_status(&pair[0]);
}

static void gives(enum ibv_wc_status status, enum ibv_wc_status wanted, const char *what)
{
    CHECK(status == wanted, "%s: %s, not %s", what, ibv_wc_status_str(status), ibv_wc_status_str(wanted));
}

/* A WRITE of all bytes into a region, by the address that the region has for peers; checks where they are. */
static void write_checked(struct ibv_mr *mr, uint64_t name, unsigned char *at, const char *what)
{
    memset(at, 0, LENGTH);
    gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, from_mr->lkey, name, mr->rkey, LENGTH), IBV_WC_SUCCESS, what);
    CHECK(!memcmp(at, from, LENGTH), "%s: the data arrived damaged", what);
}

/* What the kernel says of rights. */
static int expected_errno(unsigned access)
{
    if (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) && !(access & IBV_ACCESS_LOCAL_WRITE))
        return EINVAL;
    if (access & ~0x3ff0ffffu || access & 0xfc00)
        return EINVAL;
    return access & 0x200 ? EOPNOTSUPP : 0; /* FLUSH to persistence */
}

static void rights(void)
{
    start();
    for (unsigned access = 0; access < 0x800; access++) {
        int wanted = expected_errno(access);
        errno = 0;
        struct ibv_mr *mr = ibv_reg_mr(pair[0].pd, to, LENGTH, access);
        CHECK(!mr == !!wanted && (mr || errno == wanted), "access %#x: %s, not %s", access, strerror(errno), strerror(wanted));
        CHECK(!mr || !ibv_dereg_mr(mr), "dereg_mr");
    }
    for (int bit = 10; bit < 31; bit++) {
        int optional = bit >= 20 && bit < 30;
        errno = 0;
        struct ibv_mr *mr = ibv_reg_mr(pair[0].pd, to, LENGTH, 1 << bit);
        CHECK(optional ? !!mr : !mr && errno == EINVAL, "bit %d: %s", bit, strerror(errno));
        CHECK(!mr || !ibv_dereg_mr(mr), "dereg_mr");
    }
    /* Each right is needed, and enough. */
    static const struct { enum ibv_wr_opcode opcode; int right; } needs[] = {{IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_WRITE},
        {IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ}, {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_REMOTE_ATOMIC}};
    for (int i = 0; i < 3; i++)
        for (int without = 0; without < 2; without++) {
            int access = without ? ALL & ~needs[i].right : IBV_ACCESS_LOCAL_WRITE | needs[i].right;
            struct ibv_mr *mr = ibv_reg_mr(pair[1].pd, to, LENGTH, access);
            CHECK(mr, "reg_mr: %s", strerror(errno));
            gives(rdma(needs[i].opcode, (uintptr_t)from, from_mr->lkey, (uintptr_t)to, mr->rkey, 8),
                without ? IBV_WC_REM_ACCESS_ERR : IBV_WC_SUCCESS, "an operation");
            CHECK(!ibv_dereg_mr(mr), "dereg_mr");
            again();
        }
    /* What is not mapped, or not for writing. */
    unsigned char *holes = pages(3 * PAGE, PROT_READ);
    CHECK(!munmap(holes + PAGE, PAGE), "munmap");
    MAKES_NOTHING(ibv_reg_mr(pair[0].pd, holes, 3 * PAGE, 0), EFAULT);
    MAKES_NOTHING(ibv_reg_mr(pair[0].pd, holes + PAGE, 1, 0), EFAULT);
    MAKES_NOTHING(ibv_reg_mr(pair[0].pd, holes + 1, PAGE, 0), EFAULT);
    MAKES_NOTHING(ibv_reg_mr(pair[0].pd, holes, PAGE, IBV_ACCESS_LOCAL_WRITE), EFAULT);
    MAKES_NOTHING(ibv_reg_mr(pair[0].pd, holes, PAGE, IBV_ACCESS_MW_BIND), EFAULT);
    MAKES_NOTHING(ibv_reg_mr(pair[0].pd, NULL, PAGE, 0), EFAULT);
    MAKES_NOTHING(ibv_reg_mr(pair[0].pd, holes, PAGE, IBV_ACCESS_REMOTE_WRITE), EINVAL);
    MAKES_NOTHING(ibv_reg_mr(pair[0].pd, to, 0, 0), EINVAL);
    MAKES_NOTHING(ibv_reg_mr(pair[0].pd, to, SIZE_MAX, 0), EINVAL);
    struct ibv_mr *read_only = ibv_reg_mr(pair[1].pd, holes, PAGE, IBV_ACCESS_REMOTE_READ);
    CHECK(read_only, "reg_mr of memory that is for reading only: %s", strerror(errno));
    gives(rdma(IBV_WR_RDMA_READ, (uintptr_t)from, from_mr->lkey, (uintptr_t)holes, read_only->rkey, PAGE), IBV_WC_SUCCESS, "READ");
}

static void addresses(void)
{
    start();
    uint64_t name = 0x123456789000 + 24;
    MAKES_NOTHING(ibv_reg_mr_iova(pair[1].pd, to, LENGTH, name, ALL), EINVAL); /* another place of the page */
    MAKES_NOTHING(ibv_reg_mr_iova(pair[1].pd, to, LENGTH, -PAGE, ALL), EINVAL); /* beyond the last address */
    struct ibv_mr *mr = ibv_reg_mr_iova(pair[1].pd, to + 24, LENGTH - 24, name, ALL);
    CHECK(mr, "reg_mr_iova: %s", strerror(errno));
    CHECK(mr->addr == to + 24 && mr->length == LENGTH - 24, "addr and length");
    gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, from_mr->lkey, name + 100, mr->rkey, 1000), IBV_WC_SUCCESS, "WRITE");
    CHECK(!memcmp(to + 124, from, 1000), "the data is elsewhere");
    gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, from_mr->lkey, (uintptr_t)to + 24, mr->rkey, 8), IBV_WC_REM_ACCESS_ERR, "by the address");
    again();
    CHECK(!ibv_dereg_mr(mr), "dereg_mr");
    /* From zero on: for peers, and for work requests. */
    for (int kind = 0; kind < 2; kind++) {
        mr = kind ? ibv_reg_mr_iova(pair[1].pd, to, LENGTH, 0, ALL) : ibv_reg_mr(pair[1].pd, to, LENGTH, ALL | IBV_ACCESS_ZERO_BASED);
        CHECK(mr, "reg_mr: %s", strerror(errno));
        write_checked(mr, 0, to, "WRITE to offset 0");
        gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, from_mr->lkey, 1, mr->rkey, LENGTH), IBV_WC_REM_ACCESS_ERR, "beyond the end");
        again();
        CHECK(!ibv_dereg_mr(mr), "dereg_mr");
    }
    mr = ibv_reg_mr(pair[0].pd, from + 3, LENGTH - 3, IBV_ACCESS_ZERO_BASED);
    CHECK(mr, "reg_mr: %s", strerror(errno));
    gives(rdma(IBV_WR_RDMA_WRITE, 10, mr->lkey, (uintptr_t)to, to_mr->rkey, 500), IBV_WC_SUCCESS, "WRITE from offset 10");
    CHECK(!memcmp(to, from + 13, 500), "the data is of elsewhere");
    gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from + 3, mr->lkey, (uintptr_t)to, to_mr->rkey, 8), IBV_WC_LOC_PROT_ERR, "by the address");
}

static void rereg(void)
{
    start();
    struct ibv_pd *other_pd = ibv_alloc_pd(pair[0].context);
    CHECK(other_pd, "alloc_pd");
    unsigned char *elsewhere = pages(LENGTH, PROT_READ | PROT_WRITE);
    enum { TRANSLATION = IBV_REREG_MR_CHANGE_TRANSLATION, DOMAIN = IBV_REREG_MR_CHANGE_PD, ACCESS = IBV_REREG_MR_CHANGE_ACCESS };
    /* Every combination, and what the region is then. */
    for (int flags = 1; flags < 8; flags++) {
        struct ibv_mr *mr = ibv_reg_mr(pair[1].pd, to, LENGTH, ALL);
        CHECK(mr, "reg_mr: %s", strerror(errno));
        uint32_t lkey = mr->lkey, rkey = mr->rkey;
        write_checked(mr, (uintptr_t)to, to, "before");
        int rc = ibv_rereg_mr(mr, flags, flags & DOMAIN ? other_pd : NULL, flags & TRANSLATION ? elsewhere : NULL,
            flags & TRANSLATION ? LENGTH : 0, flags & ACCESS ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ : 0);
        CHECK(rc == 0, "rereg_mr with flags %d: %d, %s", flags, rc, strerror(errno));
        CHECK(mr->lkey == lkey && mr->rkey == rkey, "the keys changed");
        unsigned char *now = flags & TRANSLATION ? elsewhere : to, *then = flags & TRANSLATION ? to : NULL;
        CHECK(mr->addr == now && mr->length == LENGTH && mr->pd == (flags & DOMAIN ? other_pd : pair[1].pd), "fields");
        enum ibv_wc_status write = flags & (DOMAIN | ACCESS) ? IBV_WC_REM_ACCESS_ERR : IBV_WC_SUCCESS;
        enum ibv_wc_status read = flags & DOMAIN ? IBV_WC_REM_ACCESS_ERR : IBV_WC_SUCCESS;
        gives(rdma(IBV_WR_RDMA_READ, (uintptr_t)from, from_mr->lkey, (uintptr_t)now, rkey, 8), read, "READ");
        again();
        gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, from_mr->lkey, (uintptr_t)now, rkey, 8), write, "WRITE");
        again();
        if (then)
            gives(rdma(IBV_WR_RDMA_READ, (uintptr_t)from, from_mr->lkey, (uintptr_t)then, rkey, 8), IBV_WC_REM_ACCESS_ERR, "the old place");
        again();
        if (flags & DOMAIN)
            FAILS(ibv_dealloc_pd(other_pd), EBUSY);
        CHECK(!ibv_dereg_mr(mr), "dereg_mr");
    }
    /* Mistakes leave it as it was. */
    struct ibv_mr *mr = ibv_reg_mr(pair[1].pd, to, LENGTH, ALL);
    unsigned char *gone = pages(LENGTH, PROT_READ);
    struct { int flags; struct ibv_pd *pd; void *addr; size_t length; int access, rc, error; } wrong[] = {
        {8, NULL, NULL, 0, 0, IBV_REREG_MR_ERR_INPUT, EINVAL},
        {0, NULL, NULL, 0, 0, IBV_REREG_MR_ERR_CMD, EINVAL},
        {TRANSLATION, NULL, NULL, LENGTH, 0, IBV_REREG_MR_ERR_INPUT, EINVAL},
        {TRANSLATION, NULL, elsewhere, 0, 0, IBV_REREG_MR_ERR_INPUT, EINVAL},
        {DOMAIN, other_pd, NULL, 0, ALL, IBV_REREG_MR_ERR_INPUT, EINVAL},
        {ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE, IBV_REREG_MR_ERR_CMD, EINVAL},
        {ACCESS, NULL, NULL, 0, 1 << 16, IBV_REREG_MR_ERR_CMD, EINVAL},
        {TRANSLATION, NULL, gone, LENGTH, 0, IBV_REREG_MR_ERR_CMD, EFAULT},
        {TRANSLATION | DOMAIN, other_pd, gone + LENGTH - PAGE, LENGTH, 0, IBV_REREG_MR_ERR_CMD, EFAULT},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        errno = 0;
        int rc = ibv_rereg_mr(mr, wrong[i].flags, wrong[i].pd, wrong[i].addr, wrong[i].length, wrong[i].access);
        CHECK(rc == wrong[i].rc && errno == wrong[i].error, "mistake %zu: %d, %s", i, rc, strerror(errno));
        write_checked(mr, (uintptr_t)to, to, "after a mistake");
    }
    CHECK(!ibv_dealloc_pd(other_pd), "dealloc_pd: a mistake counted a region in");
    /* While a WRITE is under way: it ends well or is refused, and nothing is written beyond. */
    for (int i = 0; i < 50; i++) {
        struct ibv_sge sge = {.addr = (uintptr_t)from, .length = LENGTH, .lkey = from_mr->lkey};
        struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
            .wr.rdma = {.remote_addr = (uintptr_t)to, .rkey = mr->rkey}};
        CHECK(!ibv_post_send(pair[0].qp, &wr, &bad), "post_send");
        CHECK(!ibv_rereg_mr(mr, TRANSLATION, NULL, elsewhere, LENGTH, 0), "rereg_mr: %s", strerror(errno));
        memset(to, 0x77, LENGTH);
        enum ibv_wc_status status = next_status(&pair[0]);
        CHECK(status == IBV_WC_SUCCESS || status == IBV_WC_REM_ACCESS_ERR, "WRITE: %s", ibv_wc_status_str(status));
        for (size_t b = 0; b < LENGTH; b++)
            CHECK(to[b] == 0x77, "the old place was written after rereg_mr");
        CHECK(!ibv_rereg_mr(mr, TRANSLATION, NULL, to, LENGTH, 0), "rereg_mr back: %s", strerror(errno));
        again();
    }
}

static void null_region(void)
{
    start();
    struct ibv_mr *null = ibv_alloc_null_mr(pair[0].pd);
    CHECK(null, "alloc_null_mr: %s", strerror(errno));
    CHECK(null->addr == NULL && null->length == SIZE_MAX, "addr and length");
    memset(to, 0xff, LENGTH);
    gives(rdma(IBV_WR_RDMA_WRITE, 0xdeadbeefcafe, null->lkey, (uintptr_t)to, to_mr->rkey, PAGE), IBV_WC_SUCCESS, "WRITE of zeros");
    for (size_t i = 0; i < LENGTH; i++)
        CHECK(to[i] == (i < PAGE ? 0 : 0xff), "byte %zu is %d", i, to[i]);
    gives(rdma(IBV_WR_RDMA_READ, 3, null->lkey, (uintptr_t)to, to_mr->rkey, LENGTH), IBV_WC_SUCCESS, "READ to nowhere");
    CHECK(!receive_into(&pair[1], NULL, LENGTH, null), "post_recv");
    CHECK(!send_from(&pair[0], from, LENGTH, from_mr), "post_send");
    gives(next_status(&pair[0]), IBV_WC_SUCCESS, "SEND");
    gives(next_status(&pair[1]), IBV_WC_SUCCESS, "receive");
    errno = 0;
    FAILS(ibv_rereg_mr(null, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, to, LENGTH, 0), IBV_REREG_MR_ERR_INPUT);
    gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, from_mr->lkey, 0, null->lkey, 8), IBV_WC_REM_ACCESS_ERR, "a peer");
    CHECK(!ibv_dereg_mr(null), "dereg_mr");
}

static void on_demand(void)
{
    start();
    struct ibv_device_attr_ex attr;
    CHECK(!ibv_query_device_ex(pair[0].context, NULL, &attr), "query_device_ex");
    CHECK(attr.odp_caps.general_caps == (IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT), "general_caps");
    CHECK(attr.odp_caps.per_transport_caps.rc_odp_caps == 0xff, "rc_odp_caps");
    int access = ALL | IBV_ACCESS_ON_DEMAND;
    /* Nothing is mapped there yet. */
    unsigned char *later = pages(LENGTH, PROT_NONE);
    CHECK(!munmap(later, LENGTH), "munmap");
    struct ibv_mr *mr = ibv_reg_mr(pair[1].pd, later, LENGTH, access);
    CHECK(mr, "reg_mr on demand: %s", strerror(errno));
    gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, from_mr->lkey, (uintptr_t)later, mr->rkey, LENGTH), IBV_WC_REM_OP_ERR, "WRITE to nothing");
    again();
    void *at = mmap(later, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(at == later, "mmap: %s", strerror(errno));
    unsigned char in_core[4];
    CHECK(!mincore(later, LENGTH, in_core) && !(in_core[0] & 1), "the page is there before its use");
    write_checked(mr, (uintptr_t)later, later, "WRITE on demand");
    /* The same addresses, other memory. */
    at = mmap(later, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(at == later, "mmap: %s", strerror(errno));
    write_checked(mr, (uintptr_t)later, later, "WRITE to what was mapped again");
    CHECK(!mprotect(later, LENGTH, PROT_READ), "mprotect");
    gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, from_mr->lkey, (uintptr_t)later, mr->rkey, 8), IBV_WC_REM_OP_ERR, "WRITE to what is for reading");
    again();
    CHECK(!mprotect(later, LENGTH, PROT_READ | PROT_WRITE), "mprotect");
    /* All addresses. */
    MAKES_NOTHING(ibv_reg_mr(pair[1].pd, later, SIZE_MAX, access), EINVAL);
    MAKES_NOTHING(ibv_reg_mr(pair[1].pd, NULL, SIZE_MAX, ALL), EINVAL);
    struct ibv_mr *everything = ibv_reg_mr(pair[1].pd, NULL, SIZE_MAX, access);
    CHECK(everything, "reg_mr of all addresses: %s", strerror(errno));
    write_checked(everything, (uintptr_t)later, later, "WRITE to any address");
    for (int i = 0; i < 3; i++) {
        uint64_t nowhere[] = {8, 1ull << 63, 0xffffffffffff0000};
        gives(rdma(IBV_WR_RDMA_READ, (uintptr_t)from, from_mr->lkey, nowhere[i], everything->rkey, 8), IBV_WC_REM_OP_ERR, "where nothing is");
        again();
    }
    struct ibv_mr *local = ibv_reg_mr(pair[0].pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND);
    CHECK(local, "reg_mr of all addresses, for local reading: %s", strerror(errno));
    gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, local->lkey, (uintptr_t)to, to_mr->rkey, LENGTH), IBV_WC_SUCCESS, "WRITE from any address");
    gives(rdma(IBV_WR_RDMA_WRITE, 8, local->lkey, (uintptr_t)to, to_mr->rkey, 8), IBV_WC_LOC_PROT_ERR, "WRITE from nothing");
    again();
    gives(rdma(IBV_WR_RDMA_READ, (uintptr_t)from, from_mr->lkey, (uintptr_t)from, local->rkey, 8), IBV_WC_REM_ACCESS_ERR, "a peer without a right");
    again();

    /* Advice. */
    const enum ibv_advise_mr_advice READ = IBV_ADVISE_MR_ADVICE_PREFETCH, WRITE = IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
        NO_FAULT = IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT;
    struct ibv_pd *other_pd = ibv_alloc_pd(pair[0].context);
    unsigned char *fresh = pages(LENGTH, PROT_READ | PROT_WRITE), *hole = pages(PAGE, PROT_NONE);
    struct ibv_sge here = {.addr = (uintptr_t)fresh, .length = LENGTH, .lkey = everything->lkey}, bad = here, two[2] = {here, here};
    FAILS(ibv_advise_mr(pair[1].pd, NO_FAULT, IBV_ADVISE_MR_FLAG_FLUSH, &here, 1), 0);
    CHECK(!mincore(fresh, LENGTH, in_core) && !(in_core[0] & 1), "NO_FAULT paged something in");
    for (int flags = 0; flags < 2; flags++) {
        FAILS(ibv_advise_mr(pair[1].pd, READ, flags, &here, 1), 0);
        FAILS(ibv_advise_mr(pair[1].pd, WRITE, flags, two, 2), 0);
        CHECK(!mincore(fresh, LENGTH, in_core) && in_core[0] & 1 && in_core[3] & 1, "nothing was paged in");
        FAILS(ibv_advise_mr(pair[1].pd, 7, flags, &here, 1), EOPNOTSUPP);
        FAILS(ibv_advise_mr(pair[1].pd, READ, flags | 2, &here, 1), EINVAL);
        FAILS(ibv_advise_mr(pair[1].pd, READ, flags, NULL, 0), EINVAL);
        FAILS(ibv_advise_mr(other_pd, READ, flags, &here, 1), EPERM);
        bad.lkey = to_mr->lkey;
        FAILS(ibv_advise_mr(pair[1].pd, READ, flags, &bad, 1), ENOENT);
        bad.lkey = 0x12345;
        FAILS(ibv_advise_mr(pair[1].pd, READ, flags, &bad, 1), ENOENT);
        bad.lkey = local->lkey;
        FAILS(ibv_advise_mr(pair[1].pd, WRITE, flags, &bad, 1), EPERM);
        bad = (struct ibv_sge){.addr = (uintptr_t)later + PAGE, .length = LENGTH, .lkey = mr->lkey};
        FAILS(ibv_advise_mr(pair[1].pd, READ, flags, &bad, 1), flags ? EFAULT : 0);
        bad = (struct ibv_sge){.addr = (uintptr_t)hole, .length = PAGE, .lkey = everything->lkey};
        FAILS(ibv_advise_mr(pair[1].pd, READ, flags, &bad, 1), flags ? EFAULT : 0);
        bad = here;
    }
    CHECK(!ibv_dealloc_pd(other_pd), "dealloc_pd");
    /* To all addresses by registering again, and back. */
    CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL), "rereg_mr: %s", strerror(errno));
    FAILS(ibv_advise_mr(pair[1].pd, READ, 1, &(struct ibv_sge){.addr = (uintptr_t)later, .length = 8, .lkey = mr->lkey}, 1), ENOENT);
    struct ibv_mr *all[] = {mr, everything, local};
    for (int i = 0; i < 3; i++)
        CHECK(!ibv_dereg_mr(all[i]), "dereg_mr");
}

static void device_memory(void)
{
    start();
    struct ibv_device_attr_ex attr;
    CHECK(!ibv_query_device_ex(pair[0].context, NULL, &attr) && attr.max_dm_size >= 4096, "query_device_ex");
    struct ibv_alloc_dm_attr bad[] = {{.length = 0}, {.length = attr.max_dm_size + 1}, {.length = SIZE_MAX}, {.length = 64, .comp_mask = 1},
        {.length = 64, .log_align_req = 40}, {.length = 64, .log_align_req = 1000}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        MAKES_NOTHING(ibv_alloc_dm(pair[0].context, &bad[i]), EINVAL);
    struct ibv_alloc_dm_attr half = {.length = attr.max_dm_size / 2}, some = {.length = 1000, .log_align_req = 6};
    struct ibv_dm *one = ibv_alloc_dm(pair[0].context, &half), *two = ibv_alloc_dm(pair[0].context, &half);
    CHECK(one && two, "alloc_dm: %s", strerror(errno));
    MAKES_NOTHING(ibv_alloc_dm(pair[0].context, &some), ENOMEM);
    struct ibv_context *second = open_device();
    MAKES_NOTHING(ibv_alloc_dm(second, &some), ENOMEM);
    CHECK(!ibv_free_dm(one) && !ibv_free_dm(two), "free_dm");
    struct ibv_dm *dm = ibv_alloc_dm(second, &some);
    CHECK(dm, "alloc_dm: %s", strerror(errno));
    CHECK(!ibv_free_dm(dm) && !ibv_close_device(second), "free_dm and close");
    dm = ibv_alloc_dm(pair[1].context, &some);
    CHECK(dm && dm->comp_mask == IBV_DM_MASK_HANDLE, "alloc_dm: %s", strerror(errno));

    unsigned char buffer[1000];
    CHECK(!ibv_memcpy_from_dm(buffer, dm, 0, 1000), "memcpy_from_dm");
    for (int i = 0; i < 1000; i++)
        CHECK(!buffer[i], "device memory does not begin as zeros");
    FAILS(ibv_memcpy_to_dm(dm, 4, from, 996), 0);
    FAILS(ibv_memcpy_from_dm(buffer + 1, dm, 8, 12), 0);
    CHECK(!memcmp(buffer + 1, from + 4, 12), "memcpy_from_dm gives other bytes");
    FAILS(ibv_memcpy_to_dm(dm, 2, from, 8), EINVAL);
    FAILS(ibv_memcpy_to_dm(dm, 4, from, 7), EINVAL);
    FAILS(ibv_memcpy_to_dm(dm, 1000, from, 4), EFAULT);
    FAILS(ibv_memcpy_to_dm(dm, 0, from, 1004), EFAULT);
    FAILS(ibv_memcpy_from_dm(buffer, dm, -4ull, 8), EFAULT);
    FAILS(ibv_memcpy_from_dm(buffer, dm, 4, -4ul), EFAULT);

    int access = ALL | IBV_ACCESS_ZERO_BASED;
    MAKES_NOTHING(ibv_reg_dm_mr(pair[1].pd, dm, 0, 1000, ALL), EINVAL);
    MAKES_NOTHING(ibv_reg_dm_mr(pair[1].pd, dm, 0, 1001, access), EINVAL);
    MAKES_NOTHING(ibv_reg_dm_mr(pair[1].pd, dm, 1001, 0, access), EINVAL);
    MAKES_NOTHING(ibv_reg_dm_mr(pair[1].pd, dm, -1ull, 2, access), EINVAL);
    MAKES_NOTHING(ibv_reg_dm_mr(pair[1].pd, dm, 0, 1000, access | IBV_ACCESS_ON_DEMAND), EINVAL);
    MAKES_NOTHING(ibv_reg_dm_mr(pair[1].pd, dm, 0, 1000, IBV_ACCESS_ZERO_BASED | IBV_ACCESS_REMOTE_WRITE), EINVAL);
    struct ibv_mr *mr = ibv_reg_dm_mr(pair[1].pd, dm, 64, 512, access);
    CHECK(mr, "reg_dm_mr: %s", strerror(errno));
    CHECK(mr->addr == NULL && mr->length == 512, "addr and length");
    FAILS(ibv_free_dm(dm), EBUSY);
    gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, from_mr->lkey, 16, mr->rkey, 496), IBV_WC_SUCCESS, "WRITE to device memory");
    CHECK(!ibv_memcpy_from_dm(buffer, dm, 64 + 16, 496) && !memcmp(buffer, from, 496), "device memory has other bytes");
    uint64_t seven = 7, eight;
    CHECK(!ibv_memcpy_to_dm(dm, 64, &seven, 8), "memcpy_to_dm");
    gives(rdma(IBV_WR_ATOMIC_FETCH_AND_ADD, (uintptr_t)from, from_mr->lkey, 0, mr->rkey, 8), IBV_WC_SUCCESS, "FETCH_ADD in device memory");
    CHECK(!ibv_memcpy_from_dm(&eight, dm, 64, 8) && eight == 8, "the counter");
    CHECK(!receive_into(&pair[1], NULL, 100, mr), "post_recv to an offset");
    CHECK(!send_from(&pair[0], from, 100, from_mr), "post_send");
    gives(next_status(&pair[0]), IBV_WC_SUCCESS, "SEND");
    gives(next_status(&pair[1]), IBV_WC_SUCCESS, "receive");
    CHECK(!ibv_memcpy_from_dm(buffer, dm, 64, 100) && !memcmp(buffer, from, 100), "the receive has other bytes");
    errno = 0;
    FAILS(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, to, LENGTH, 0), IBV_REREG_MR_ERR_CMD);
    CHECK(errno == EINVAL, "rereg_mr sets %s", strerror(errno));
    gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, from_mr->lkey, 16, mr->rkey, 497), IBV_WC_REM_ACCESS_ERR, "beyond the region");
    CHECK(!ibv_dereg_mr(mr), "dereg_mr");
    FAILS(ibv_free_dm(dm), 0);
}

/* An allocator that notes what it gave. */
static struct { void *at; struct ibv_pd *pd; size_t size; uint64_t type; } given[16];
static int gave, freed, context_of_test, use_default, refuse;

static void *give(struct ibv_pd *pd, void *context, size_t size, size_t alignment, uint64_t type)
{
    CHECK(context == &context_of_test, "the allocator gets another context");
    if (use_default)
        return IBV_ALLOCATOR_USE_DEFAULT;
    if (refuse)
        return NULL;
    void *at;
    CHECK(gave < 16 && !posix_memalign(&at, alignment, size), "posix_memalign of %zu aligned to %zu", size, alignment);
    memset(at, 0, size);
    given[gave].at = at, given[gave].pd = pd, given[gave].size = size, given[gave].type = type;
    gave++;
    return at;
}

static void take_back(struct ibv_pd *pd, void *context, void *at, uint64_t type)
{
    CHECK(context == &context_of_test, "the allocator gets another context");
    for (int i = 0; i < gave; i++)
        if (given[i].at == at) {
            CHECK(given[i].pd == pd && given[i].type == type, "freed with another PD or type");
            memset(at, 0xa5, given[i].size);
            given[i].at = NULL;
            freed++;
            free(at);
            return;
        }
    die("something is freed that was not given, or twice");
}

static void domains(void)
{
    start();
    struct ibv_context *context = pair[0].context;
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_td_init_attr td_bad = {.comp_mask = 1}, td_attr = {0};
    MAKES_NOTHING(ibv_alloc_td(context, &td_bad), EINVAL);
    struct ibv_td *td = ibv_alloc_td(context, &td_attr);
    CHECK(td && td->context == context, "alloc_td: %s", strerror(errno));
    struct ibv_parent_domain_init_attr attr = {.td = td};
    MAKES_NOTHING(ibv_alloc_parent_domain(context, &attr), EINVAL);
    attr.pd = pd;
    attr.comp_mask = 1 << 20;
    MAKES_NOTHING(ibv_alloc_parent_domain(context, &attr), EINVAL);
    attr.comp_mask = 0;
    struct ibv_pd *with_td = ibv_alloc_parent_domain(context, &attr);
    CHECK(with_td && with_td != pd && with_td->context == context && with_td->handle == pd->handle, "alloc_parent_domain: %s", strerror(errno));
    FAILS(ibv_dealloc_td(td), EBUSY);
    FAILS(ibv_dealloc_pd(pd), EBUSY);
    struct ibv_parent_domain_init_attr alloc_attr = {.pd = with_td, .alloc = give, .free = take_back, .pd_context = &context_of_test,
        .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT};
    struct ibv_pd *parent = ibv_alloc_parent_domain(context, &alloc_attr);
    CHECK(parent, "alloc_parent_domain: %s", strerror(errno));
    FAILS(ibv_dealloc_pd(with_td), EBUSY);

    /* Everything that is made in a PD, in the parent domain; each keeps it. */
    struct ibv_mr *mr = ibv_reg_mr(parent, to, LENGTH, ALL);
    CHECK(mr && mr->pd == parent, "reg_mr: %s", strerror(errno));
    FAILS(ibv_dealloc_pd(parent), EBUSY);
    CHECK(!ibv_dereg_mr(mr), "dereg_mr");
    struct ibv_ah_attr ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = pair[0].address.gid}};
    struct ibv_ah *ah = ibv_create_ah(parent, &ah_attr);
    CHECK(ah, "create_ah: %s", strerror(errno));
    FAILS(ibv_dealloc_pd(parent), EBUSY);
    CHECK(!ibv_destroy_ah(ah) && !gave, "destroy_ah");
    struct ibv_srq_init_attr srq_attr = {.attr = {.max_wr = 8, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(parent, &srq_attr);
    CHECK(srq && gave == 1 && given[0].pd == parent && given[0].at == (void *)srq, "create_srq: %s", strerror(errno));
    FAILS(ibv_dealloc_pd(parent), EBUSY);
    CHECK(!ibv_destroy_srq(srq) && freed == 1, "destroy_srq");
    struct ibv_cq_init_attr_ex cq_attr = {.cqe = 64, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = pd};
    MAKES_NOTHING(ibv_create_cq_ex(context, &cq_attr), EINVAL); /* a plain PD */
    cq_attr.parent_domain = parent;
    struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &cq_attr);
    CHECK(cq && gave == 2, "create_cq_ex: %s", strerror(errno));
    FAILS(ibv_dealloc_pd(parent), EBUSY);
    /* A queue pair in it works, with regions of the PD itself. */
    CHECK(!ibv_destroy_qp(pair[1].qp), "destroy_qp");
    struct ibv_qp_init_attr init = {.send_cq = ibv_cq_ex_to_cq(cq), .recv_cq = pair[1].cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1}};
    refuse = 1;
    MAKES_NOTHING(ibv_create_qp(parent, &init), ENOMEM);
    refuse = 0;
    pair[1].qp = ibv_create_qp(parent, &init);
    CHECK(pair[1].qp && gave == 3 && pair[1].qp->pd == parent, "create_qp: %s", strerror(errno));
    CHECK(given[0].type != given[1].type && given[1].type != given[2].type && given[0].type != given[2].type, "types of resources");
    FAILS(ibv_dealloc_pd(parent), EBUSY);
    pair[1].address.qpn = pair[1].qp->qp_num;
    again();
    mr = ibv_reg_mr(pd, to, LENGTH, ALL);
    CHECK(mr, "reg_mr: %s", strerror(errno));
    write_checked(mr, (uintptr_t)to, to, "WRITE to a region of the PD");
    CHECK(!receive_into(&pair[1], to, LENGTH, mr) && !send_from(&pair[0], from, LENGTH, from_mr), "post");
    gives(next_status(&pair[0]), IBV_WC_SUCCESS, "SEND");
    gives(next_status(&pair[1]), IBV_WC_SUCCESS, "receive");
    CHECK(!ibv_destroy_qp(pair[1].qp) && freed == 2, "destroy_qp");
    CHECK(!ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) && freed == 3, "destroy_cq");
    /* The allocator leaves it to the provider. */
    use_default = 1;
    srq = ibv_create_srq(parent, &srq_attr);
    CHECK(srq && gave == 3, "create_srq: %s", strerror(errno));
    CHECK(!ibv_destroy_srq(srq) && freed == 3, "destroy_srq");
    CHECK(!ibv_dealloc_pd(parent), "dealloc_pd of the parent domain");
    FAILS(ibv_dealloc_pd(pd), EBUSY);
    CHECK(!ibv_dealloc_pd(with_td) && !ibv_dealloc_td(td), "dealloc");
    FAILS(ibv_dealloc_pd(pd), EBUSY);
    CHECK(!ibv_dereg_mr(mr), "dereg_mr");
    ah = ibv_create_ah(pd, &ah_attr);
    FAILS(ibv_dealloc_pd(pd), EBUSY);
    CHECK(!ibv_destroy_ah(ah) && !ibv_dealloc_pd(pd), "dealloc_pd");
}

/* A DMA buffer of LENGTH bytes, by udmabuf or by a graphics driver (vgem will do); -1 where there are none.
 * The structures and requests are those of linux/udmabuf.h and drm/drm.h. */
static int dma_buffer(void)
{
    struct { uint32_t memfd, flags; uint64_t offset, size; } part = {.size = LENGTH};
    struct { uint32_t height, width, bpp, flags, handle, pitch; uint64_t size; } dumb = {.height = LENGTH / PAGE, .width = PAGE / 4, .bpp = 32};
    struct { uint32_t handle, flags; int32_t fd; } prime = {.flags = O_RDWR | O_CLOEXEC, .fd = -1};
    int fd = -1, memfd = memfd_create("test", MFD_ALLOW_SEALING), device = open("/dev/udmabuf", O_RDWR);
    part.memfd = memfd;
    if (device >= 0 && !ftruncate(memfd, LENGTH) && !fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK))
        fd = ioctl(device, _IOC(_IOC_WRITE, 'u', 0x42, sizeof part), &part);
    close(memfd);
    for (int card = 0; fd < 0 && card < 4; card++) {
        char path[32];
        snprintf(path, sizeof path, "/dev/dri/card%d", card);
        close(device);
        device = open(path, O_RDWR);
        if (device >= 0 && !ioctl(device, _IOC(_IOC_READ | _IOC_WRITE, 'd', 0xb2, sizeof dumb), &dumb) && dumb.size >= LENGTH) {
            prime.handle = dumb.handle;
            if (!ioctl(device, _IOC(_IOC_READ | _IOC_WRITE, 'd', 0x2d, sizeof prime), &prime))
                fd = prime.fd;
        }
    }
    close(device);
    return fd;
}

static void dma_buffers(void)
{
    start();
    int memfd = memfd_create("test", 0), closed = dup(memfd);
    CHECK(!ftruncate(memfd, LENGTH) && !close(closed), "memfd: %s", strerror(errno));
    MAKES_NOTHING(ibv_reg_dmabuf_mr(pair[1].pd, 0, PAGE, 0, closed, ALL), EBADF);
    MAKES_NOTHING(ibv_reg_dmabuf_mr(pair[1].pd, 0, PAGE, 0, memfd, ALL), EINVAL); /* no DMA buffer */
    MAKES_NOTHING(ibv_reg_dmabuf_mr(pair[1].pd, 0, PAGE, 8, memfd, ALL), EINVAL);
    MAKES_NOTHING(ibv_reg_dmabuf_mr(pair[1].pd, 0, PAGE, 0, memfd, IBV_ACCESS_REMOTE_WRITE), EINVAL);
    int fd = dma_buffer();
    if (fd < 0) {
        puts("no device here gives DMA buffers");
        return;
    }
    unsigned char *shared = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(shared != MAP_FAILED, "mmap: %s", strerror(errno));
    MAKES_NOTHING(ibv_reg_dmabuf_mr(pair[1].pd, 0, 1 << 30, 0, fd, ALL), EINVAL);
    MAKES_NOTHING(ibv_reg_dmabuf_mr(pair[1].pd, 1 << 30, PAGE, 0, fd, ALL), EINVAL);
    MAKES_NOTHING(ibv_reg_dmabuf_mr(pair[1].pd, 0, 0, 0, fd, ALL), EINVAL);
    MAKES_NOTHING(ibv_reg_dmabuf_mr(pair[1].pd, 0, PAGE, 0, fd, ALL | IBV_ACCESS_ON_DEMAND), EINVAL);
    struct ibv_mr *mr = ibv_reg_dmabuf_mr(pair[1].pd, PAGE + 8, 2 * PAGE, 0x7000008, fd, ALL);
    CHECK(mr, "reg_dmabuf_mr: %s", strerror(errno));
    CHECK(!close(fd), "close"); /* the region keeps the buffer */
    gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, from_mr->lkey, 0x7000010, mr->rkey, 5000), IBV_WC_SUCCESS, "WRITE");
    CHECK(!memcmp(shared + PAGE + 16, from, 5000), "the DMA buffer has other bytes");
    gives(rdma(IBV_WR_ATOMIC_FETCH_AND_ADD, (uintptr_t)to, to_mr->lkey, 0x7000008, mr->rkey, 8), IBV_WC_SUCCESS, "FETCH_ADD");
    CHECK(*(uint64_t *)(shared + PAGE + 8) == 1, "the counter in the DMA buffer");
    errno = 0;
    FAILS(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, to, LENGTH, 0), IBV_REREG_MR_ERR_INPUT);
    CHECK(!ibv_dereg_mr(mr), "dereg_mr");
    puts("with a DMA buffer");
}

/* struct ibv_mr_init_attr, of rdma-core 59 and later. */
struct mr_attr {
    size_t length;
    int access;
    uint64_t comp_mask, iova;
    void *addr;
    int fd;
    uint64_t fd_offset;
    void *dmah, *buf;
};
enum { WITH_IOVA = 1, WITH_ADDR = 2, WITH_FD = 4, WITH_FD_OFFSET = 8, WITH_DMAH = 16 };

/* What only newer libraries have: ibv_reg_mr_ex (59), ibv_dm_export_dmabuf_fd (62), ibv_alloc_buf (64). */
static void newer(void)
{
    struct ibv_mr *(*reg_mr_ex)(struct ibv_pd *, struct mr_attr *) = dlsym(RTLD_DEFAULT, "ibv_reg_mr_ex");
    void *(*alloc_dmah)(struct ibv_context *, void *) = dlsym(RTLD_DEFAULT, "ibv_alloc_dmah");
    int (*export_dm)(struct ibv_dm *) = dlsym(RTLD_DEFAULT, "ibv_dm_export_dmabuf_fd");
    void *(*alloc_buf)(struct ibv_pd *, size_t, void **) = dlsym(RTLD_DEFAULT, "ibv_alloc_buf");
    struct ibv_mr *(*reg_buf_mr)(struct ibv_pd *, void *, void *, size_t, int) = dlsym(RTLD_DEFAULT, "ibv_reg_buf_mr");
    void (*free_buf)(void *) = dlsym(RTLD_DEFAULT, "ibv_free_buf");
    if (!reg_mr_ex) {
        puts("this library has no ibv_reg_mr_ex");
        return;
    }
    start();
    struct mr_attr plain = {.length = LENGTH, .access = ALL, .comp_mask = WITH_ADDR, .addr = to}, attr = plain;
    struct ibv_mr *mr = reg_mr_ex(pair[1].pd, &attr);
    CHECK(mr && mr->addr == to && mr->length == LENGTH && mr->pd == pair[1].pd, "reg_mr_ex: %s", strerror(errno));
    write_checked(mr, (uintptr_t)to, to, "WRITE");
    CHECK(!ibv_dereg_mr(mr), "dereg_mr");
    attr.comp_mask |= WITH_IOVA;
    attr.iova = 0x5000000;
    mr = reg_mr_ex(pair[1].pd, &attr);
    CHECK(mr, "reg_mr_ex with an address of its own: %s", strerror(errno));
    write_checked(mr, 0x5000000, to, "WRITE");
    CHECK(!ibv_dereg_mr(mr), "dereg_mr");
    static const uint64_t wrong[] = {0, WITH_IOVA, WITH_FD, WITH_FD | WITH_FD_OFFSET, WITH_ADDR | WITH_FD_OFFSET,
        WITH_ADDR | WITH_FD | WITH_FD_OFFSET | WITH_IOVA, WITH_FD | WITH_IOVA};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        attr = plain;
        attr.comp_mask = wrong[i];
        MAKES_NOTHING(reg_mr_ex(pair[1].pd, &attr), EINVAL);
    }
    int unknown = 99;
    attr = plain;
    attr.comp_mask |= WITH_DMAH;
    attr.dmah = &unknown;
    MAKES_NOTHING(reg_mr_ex(pair[1].pd, &attr), EOPNOTSUPP);
    attr.comp_mask = WITH_ADDR | 1ull << 40;
    MAKES_NOTHING(reg_mr_ex(pair[1].pd, &attr), EOPNOTSUPP);
    attr = (struct mr_attr){.length = 2 * PAGE, .access = ALL, .comp_mask = WITH_FD | WITH_FD_OFFSET | WITH_IOVA, .fd = dma_buffer(), .fd_offset = PAGE};
    if (attr.fd >= 0) {
        mr = reg_mr_ex(pair[1].pd, &attr);
        CHECK(mr && mr->addr == (void *)PAGE, "reg_mr_ex of a DMA buffer: %s", strerror(errno));
        gives(rdma(IBV_WR_RDMA_WRITE, (uintptr_t)from, from_mr->lkey, 8, mr->rkey, 100), IBV_WC_SUCCESS, "WRITE");
        CHECK(!ibv_dereg_mr(mr), "dereg_mr");
    } else
        MAKES_NOTHING(reg_mr_ex(pair[1].pd, &attr), EBADF);
    uint32_t hints[4] = {0};
    MAKES_NOTHING(alloc_dmah(pair[0].context, hints), EOPNOTSUPP);
    if (export_dm) {
        struct ibv_alloc_dm_attr dm_attr = {.length = 4096};
        struct ibv_dm *dm = ibv_alloc_dm(pair[0].context, &dm_attr);
        CHECK(dm, "alloc_dm: %s", strerror(errno));
        FAILS(export_dm(dm), -1);
        CHECK(errno == EOPNOTSUPP && !ibv_free_dm(dm), "export sets %s", strerror(errno));
    }
    if (alloc_buf) {
        void *buf;
        unsigned char *at = alloc_buf(pair[1].pd, LENGTH, &buf);
        CHECK(at, "alloc_buf: %s", strerror(errno));
        MAKES_NOTHING(reg_buf_mr(pair[1].pd, buf, at, LENGTH + 1, ALL), EINVAL);
        mr = reg_buf_mr(pair[1].pd, buf, at, LENGTH, ALL);
        CHECK(mr, "reg_buf_mr: %s", strerror(errno));
        write_checked(mr, (uintptr_t)at, at, "WRITE to a buffer of the library");
        CHECK(!ibv_dereg_mr(mr), "dereg_mr");
        free_buf(buf);
    }
    puts("all that newer libraries have");
}

/* What this device can't do says so. */
static void imports(void)
{
    start();
    MAKES_NOTHING(ibv_import_device(dup(pair[0].context->cmd_fd)), EOPNOTSUPP);
    MAKES_NOTHING(ibv_import_pd(pair[0].context, pair[0].pd->handle), EOPNOTSUPP);
    MAKES_NOTHING(ibv_import_mr(pair[0].pd, from_mr->handle), EOPNOTSUPP);
    MAKES_NOTHING(ibv_import_dm(pair[0].context, 1), EOPNOTSUPP);
}

/* With memory that children do not inherit. */
static void fork_safe(void)
{
    int rc = ibv_fork_init();
    CHECK(!rc, "fork_init: %s", strerror(rc));
    CHECK(ibv_is_fork_initialized() != IBV_FORK_DISABLED, "is_fork_initialized");
    start();
    struct ibv_mr *twice = ibv_reg_mr(pair[1].pd, to, LENGTH, ALL);
    struct ibv_mr *lazy = ibv_reg_mr(pair[1].pd, to, LENGTH, ALL | IBV_ACCESS_ON_DEMAND);
    CHECK(twice && lazy, "reg_mr: %s", strerror(errno));
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        CHECK(child >= 0, "fork: %s", strerror(errno));
        if (!child) {
            errno = 0;
            _exit(!(ibv_reg_mr(pair[1].pd, &rc, sizeof rc, 0) == NULL && errno == EIO));
        }
        write_checked(to_mr, (uintptr_t)to, to, "WRITE while a child lives");
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with %#x", status);
    }
    unsigned char *elsewhere = pages(LENGTH, PROT_READ | PROT_WRITE);
    CHECK(!ibv_rereg_mr(twice, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, elsewhere, LENGTH, 0), "rereg_mr: %s", strerror(errno));
    write_checked(twice, (uintptr_t)elsewhere, elsewhere, "WRITE to the new place");
    CHECK(!ibv_dereg_mr(lazy) && !ibv_dereg_mr(twice) && !ibv_dereg_mr(to_mr), "dereg_mr");
}

#define ADDS 2000
static uint64_t *counter;

static void *add_by_cpu(void *unused)
{
    for (int i = 0; i < 100 * ADDS; i++)
        __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
    return unused;
}

static void add_by_device(void)
{
    struct ibv_mr *mr = ibv_reg_mr(pair[1].pd, counter, 8, ALL);
    CHECK(mr, "reg_mr: %s", strerror(errno));
    for (int i = 0; i < ADDS; i++)
        gives(rdma(IBV_WR_ATOMIC_FETCH_AND_ADD, (uintptr_t)from, from_mr->lkey, (uintptr_t)counter, mr->rkey, 8), IBV_WC_SUCCESS, "FETCH_ADD");
}

/* One counter in memory that processes share: two devices of two processes and two CPUs add to it. */
static void atomics(void)
{
    counter = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(counter != MAP_FAILED, "mmap: %s", strerror(errno));
    pid_t child = fork();
    CHECK(child >= 0, "fork: %s", strerror(errno));
    start();
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, add_by_cpu, NULL), "pthread_create");
    add_by_device();
    CHECK(!pthread_join(thread, NULL), "pthread_join");
    if (!child)
        _exit(0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with %#x", status);
    CHECK(*counter == 2 * 101 * ADDS, "the counter is %lu, not %d", *counter, 2 * 101 * ADDS);
}

int main(int argc, char **argv)
{
    static const struct { const char *name; void (*run)(void); } cases[] = {{"rights", rights}, {"addresses", addresses},
        {"rereg", rereg}, {"null", null_region}, {"on-demand", on_demand}, {"device-memory", device_memory}, {"domains", domains},
        {"dma-buffers", dma_buffers}, {"newer", newer}, {"imports", imports}, {"fork-safe", fork_safe}, {"atomics", atomics}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (argc == 2 && !strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            return 0;
        }
    die("usage: regions CASE");
}
