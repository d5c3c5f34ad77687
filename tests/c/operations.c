/* operations CASE: what single operations promise to the byte: ATOMIC WRITE and FLUSH, and messages of 2^31 bytes. */
#define _GNU_SOURCE
#include "verbs_pair.h"
#include <stddef.h>
#include <sys/mman.h>

#define ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)
#define LONGEST (1ull << 31)
#define CHUNK (1ull << 21)

/* What headers before rdma-core 45 do not know: ibv_wr_flush, the member behind wr_atomic_write, and its numbers. */
typedef void (*wr_flush_t)(struct ibv_qp_ex *, uint32_t rkey, uint64_t addr, size_t length, uint8_t type, uint8_t level);
#define WR_FLUSH(ex) (*(wr_flush_t *)((char *)(ex) + offsetof(struct ibv_qp_ex, wr_atomic_write) + sizeof(wr_flush_t)))
enum { WITH_FLUSH = 1 << 11, ACCESS_GLOBAL = 1 << 8, ACCESS_PERSISTENT = 1 << 9, TO_GLOBAL = 1, OF_RANGE = 0, OF_REGION = 1,
    WC_FLUSH = 8 };

static struct side pair[2];

/* Two QPs that have ATOMIC WRITE, and more operations if need be. */
static void start_extended(uint64_t more)
{
    struct ibv_context *context = open_device();
    struct ibv_pd *pd = ibv_alloc_pd(context);
    CHECK(pd, "alloc_pd: %s", strerror(errno));
    for (int i = 0; i < 2; i++) {
        pair[i] = make_side(context, pd);
        CHECK(!ibv_destroy_qp(pair[i].qp), "destroy_qp");
        struct ibv_qp_init_attr_ex init = {.send_cq = pair[i].cq, .recv_cq = pair[i].cq, .qp_type = IBV_QPT_RC,
            .sq_sig_all = 1, .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1},
            .pd = pd, .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_ATOMIC_WRITE | more};
        pair[i].qp = ibv_create_qp_ex(context, &init);
        CHECK(pair[i].qp, "create_qp_ex: %s", strerror(errno));
        CHECK(init.cap.max_inline_data >= 8, "no room for the word of an ATOMIC WRITE");
        pair[i].address.qpn = pair[i].qp->qp_num;
    }
    connect_side(&pair[0], &pair[1].address);
    connect_side(&pair[1], &pair[0].address);
}

static struct ibv_wc next(struct side *side)
{
    time_t end = time(NULL) + 120;
    struct ibv_wc wc;
    int n;
    while ((n = ibv_poll_cq(side->cq, 1, &wc)) == 0)
        CHECK(time(NULL) < end, "no completion in 120 s");
    CHECK(n == 1, "poll_cq: %d", n);
    return wc;
}

static void atomic_write(void)
{
    start_extended(0);
    struct ibv_device_attr_ex device;
    CHECK(!ibv_query_device_ex(pair[0].context, NULL, &device), "query_device_ex");
    CHECK(device.device_cap_flags_ex & (1ull << 40), "the device does not say that it has ATOMIC WRITE");
    _Alignas(4096) static uint64_t words[512];
    words[0] = 1;
    words[2] = 3;
    struct ibv_mr *mr = ibv_reg_mr(pair[0].pd, words, sizeof words, ACCESS);
    CHECK(mr, "reg_mr: %s", strerror(errno));
    uint64_t value = 0x1122334455667788;
    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(pair[0].qp);
    ibv_wr_start(ex);
    ex->wr_flags = 0;
    ex->wr_id = 1;
    ibv_wr_atomic_write(ex, mr->rkey, (uintptr_t)&words[1], &value);
    value = 0; /* it was copied */
    CHECK(!ibv_wr_complete(ex), "wr_complete");
    struct ibv_wc wc = next(&pair[0]);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_ATOMIC_WRITE && wc.wr_id == 1, "%s", ibv_wc_status_str(wc.status));
    CHECK(words[0] == 1 && words[1] == 0x1122334455667788 && words[2] == 3, "the word is another, or not alone");
    /* By a list entry. */
    struct ibv_sge sge = {.addr = (uintptr_t)&words[2], .length = 8, .lkey = mr->lkey};
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_WRITE,
        .wr.rdma = {.remote_addr = (uintptr_t)&words[4], .rkey = mr->rkey}};
    CHECK(!ibv_post_send(pair[0].qp, &wr, &bad), "post_send");
    CHECK(next(&pair[0]).status == IBV_WC_SUCCESS && words[4] == 3, "an ATOMIC WRITE of a list entry");
    wr.wr.rdma.remote_addr += 4;
    CHECK(!ibv_post_send(pair[0].qp, &wr, &bad), "post_send");
    CHECK(next(&pair[0]).status == IBV_WC_REM_INV_REQ_ERR, "an ATOMIC WRITE that is not aligned");
}

static void flush(void)
{
    start_extended(WITH_FLUSH);
    struct ibv_device_attr_ex device;
    CHECK(!ibv_query_device_ex(pair[0].context, NULL, &device), "query_device_ex");
    CHECK(device.device_cap_flags_ex & (1ull << 38), "the device does not say that it has FLUSH");
    struct ibv_qp_attr attr = {.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | ACCESS_GLOBAL};
    CHECK(!ibv_modify_qp(pair[1].qp, &attr, IBV_QP_ACCESS_FLAGS), "modify_qp");
    _Alignas(4096) static char bytes[4096];
    struct ibv_mr *mr = ibv_reg_mr(pair[0].pd, bytes, sizeof bytes, ACCESS | ACCESS_GLOBAL);
    CHECK(mr, "reg_mr: %s", strerror(errno));
    CHECK(!ibv_reg_mr(pair[0].pd, bytes, sizeof bytes, ACCESS | ACCESS_PERSISTENT) && errno == EOPNOTSUPP,
        "memory that outlasts a loss of power");
    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(pair[0].qp);
    ibv_wr_start(ex);
    WR_FLUSH(ex)(ex, mr->rkey, (uintptr_t)bytes, 100, TO_GLOBAL, OF_RANGE);
    WR_FLUSH(ex)(ex, mr->rkey, 0, 0, TO_GLOBAL, OF_REGION);
    CHECK(!ibv_wr_complete(ex), "wr_complete");
    for (int i = 0; i < 2; i++) {
        struct ibv_wc wc = next(&pair[0]);
        CHECK(wc.status == IBV_WC_SUCCESS && (int)wc.opcode == WC_FLUSH, "%s", ibv_wc_status_str(wc.status));
    }
    ibv_wr_start(ex);
    WR_FLUSH(ex)(ex, mr->rkey, (uintptr_t)bytes, 100, 0, OF_RANGE);
    CHECK(ibv_wr_complete(ex) == EINVAL, "a FLUSH to nowhere");
    ibv_wr_start(ex);
    WR_FLUSH(ex)(ex, mr->rkey, (uintptr_t)bytes, 5000, TO_GLOBAL, OF_RANGE);
    CHECK(!ibv_wr_complete(ex), "wr_complete");
    CHECK(next(&pair[0]).status == IBV_WC_REM_ACCESS_ERR, "a FLUSH of more than there is");
}

/* Memory of 2^31 bytes: its first and last chunk are of their own, all others the same. */
static unsigned char *long_memory(void)
{
    int fd = memfd_create("long", 0);
    CHECK(fd >= 0 && !ftruncate(fd, 3 * CHUNK), "memfd: %s", strerror(errno));
    unsigned char *memory = mmap(NULL, LONGEST, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED, "mmap: %s", strerror(errno));
    for (uint64_t at = 0; at < LONGEST; at += CHUNK) {
        off_t from = at == 0 ? 0 : at == LONGEST - CHUNK ? 2 * CHUNK : CHUNK;
        void *piece = mmap(memory + at, CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, from);
        CHECK(piece != MAP_FAILED, "mmap: %s", strerror(errno));
    }
    close(fd);
    return memory;
}

/* The chunks that differ. */
static const uint64_t chunks[3] = {0, CHUNK, LONGEST - CHUNK};

static void fill(unsigned char *memory, unsigned seed)
{
    for (int i = 0; i < 3; i++) {
        uint64_t x = seed + (unsigned)i + 1;
        for (uint64_t at = 0; at < CHUNK; at += 8) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            memcpy(memory + chunks[i] + at, &x, 8);
        }
    }
}

static void long_message(enum ibv_wr_opcode opcode)
{
    path_mtu = IBV_MTU_4096;
    make_pair(pair);
    struct ibv_port_attr port;
    CHECK(!ibv_query_port(pair[0].context, 1, &port) && port.max_msg_sz == LONGEST, "max_msg_sz is %u", port.max_msg_sz);
    unsigned char *from = long_memory(), *to = long_memory();
    fill(from, 10);
    fill(to, 20);
    struct ibv_mr *from_mr = ibv_reg_mr(pair[0].pd, from, LONGEST, ACCESS);
    struct ibv_mr *to_mr = ibv_reg_mr(pair[0].pd, to, LONGEST, ACCESS);
    CHECK(from_mr && to_mr, "reg_mr: %s", strerror(errno));
    int read = opcode == IBV_WR_RDMA_READ;
    if (opcode == IBV_WR_SEND)
        CHECK(!receive_into(&pair[1], to, LONGEST, to_mr), "post_recv");
    struct ibv_mr *local = read ? to_mr : from_mr, *remote = read ? from_mr : to_mr;
    struct ibv_sge sge = {.addr = (uintptr_t)local->addr, .length = LONGEST, .lkey = local->lkey};
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode,
        .wr.rdma = {.remote_addr = (uintptr_t)remote->addr, .rkey = remote->rkey}};
    CHECK(!ibv_post_send(pair[0].qp, &wr, &bad), "post_send");
    struct ibv_wc wc = next(&pair[0]);
    CHECK(wc.status == IBV_WC_SUCCESS, "%s", ibv_wc_status_str(wc.status));
    CHECK(!read || wc.byte_len == LONGEST, "%u bytes", wc.byte_len);
    if (opcode == IBV_WR_SEND) {
        wc = next(&pair[1]);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == LONGEST, "receive: %s", ibv_wc_status_str(wc.status));
    }
    for (int i = 0; i < 3; i++)
        CHECK(!memcmp(from + chunks[i], to + chunks[i], CHUNK), "the data arrived damaged");
}

static void long_write(void) { long_message(IBV_WR_RDMA_WRITE); }
static void long_read(void) { long_message(IBV_WR_RDMA_READ); }
static void long_send(void) { long_message(IBV_WR_SEND); }

int main(int argc, char **argv)
{
    static const struct { const char *name; void (*run)(void); } cases[] = {
        {"atomic-write", atomic_write}, {"flush", flush},
        {"long-write", long_write}, {"long-read", long_read}, {"long-send", long_send},
    };
    for (size_t i = 0; argc == 2 && i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            return 0;
        }
    die("usage: operations atomic-write|flush|long-write|long-read|long-send");
}
