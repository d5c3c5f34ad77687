/* order CASE: what is visible when: data before completions, the end of a WRITE last, and operations in their order. */
#include "verbs_any.h"
#include <stdatomic.h>

static struct ibv_context *context;
static struct ibv_pd *pd;

static void write_to(struct any *from, struct any *to, uint32_t length, enum ibv_wr_opcode opcode, int flags)
{
    struct ibv_sge sge = piece(from, 0, length);
    struct ibv_send_wr wr = {.opcode = opcode, .send_flags = flags,
        .wr.rdma = {.remote_addr = (uintptr_t)to->buffer, .rkey = to->mr->rkey}};
    FAILS(post_one(from, &sge, wr), 0);
}

static void connected(struct any two[2], enum ibv_qp_type type)
{
    for (int i = 0; i < 2; i++)
        two[i] = make_any(context, pd, type);
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr attr = good_attr(context, two[!i].qp->qp_num);
        attr.rnr_retry = 7; /* for ever */
        take_to(&two[i], IBV_QPS_RTS, attr);
    }
}

/* A program that polls on the last bytes of what a peer writes finds all of it, whatever the length. */
static void last_byte(void)
{
    static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC};
    for (int t = 0; t < 2; t++) {
        struct any two[2];
        connected(two, types[t]);
        for (int i = 1; i < 600; i++) {
            uint32_t length = i < 100 ? i : i * 61 % 20000 + 1;
            unsigned char value = (unsigned char)(i % 255 + 1);
            memset(two[0].buffer, value, length);
            write_to(&two[0], &two[1], length, IBV_WR_RDMA_WRITE, 0);
            volatile unsigned char *last = two[1].buffer + length - 1;
            time_t end = time(NULL) + 30;
            while (*last != value)
                CHECK(time(NULL) < end, "the last of %u bytes does not come", length);
            atomic_thread_fence(memory_order_acquire);
            for (uint32_t at = 0; at < length; at++)
                CHECK(two[1].buffer[at] == value, "byte %u of %u is not there when the last is", at, length);
            CHECK(next_wc(two[0].send_cq).status == IBV_WC_SUCCESS, "write");
            memset(two[1].buffer, 0, length);
        }
        destroy_any(&two[0]);
        destroy_any(&two[1]);
    }
}

/* The completion of a receive tells of all that was written before. */
static void before_completion(void)
{
    struct any two[2];
    connected(two, IBV_QPT_RC);
    for (int i = 1; i < 500; i++) {
        uint32_t length = i * 97 % 30000 + 1;
        unsigned char value = (unsigned char)(i % 255 + 1);
        memset(two[0].buffer, value, length);
        FAILS(receive_one(&two[1], i, piece(&two[1], 40000, 64)), 0);
        if (i % 2) {
            write_to(&two[0], &two[1], length, IBV_WR_RDMA_WRITE, 0);
            struct ibv_sge sge = piece(&two[0], 0, 1);
            FAILS(post_one(&two[0], &sge, (struct ibv_send_wr){.opcode = IBV_WR_SEND}), 0);
        } else {
            write_to(&two[0], &two[1], length, IBV_WR_RDMA_WRITE_WITH_IMM, 0);
        }
        struct ibv_wc wc = next_wc(two[1].recv_cq);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)i, "receive: %s", ibv_wc_status_str(wc.status));
        for (uint32_t at = 0; at < length; at++)
            CHECK(two[1].buffer[at] == value, "byte %u of %u is not there when the receive completes", at, length);
        for (int n = 0; n <= i % 2; n++)
            CHECK(next_wc(two[0].send_cq).status == IBV_WC_SUCCESS, "send");
    }
    destroy_any(&two[0]);
    destroy_any(&two[1]);
}

/* A READ finds what a WRITE before it wrote, a fenced WRITE has what a READ before it brought. */
static void reads(void)
{
    struct any two[2];
    connected(two, IBV_QPT_RC);
    for (int i = 1; i < 300; i++) {
        uint32_t length = i * 131 % 10000 + 1;
        unsigned char value = (unsigned char)(i % 255 + 1);
        memset(two[0].buffer, value, length);
        write_to(&two[0], &two[1], length, IBV_WR_RDMA_WRITE, 0);
        struct ibv_sge into = piece(&two[0], 30000, length), again = into;
        struct ibv_send_wr wr = {.wr_id = 1, .opcode = IBV_WR_RDMA_READ,
            .wr.rdma = {.remote_addr = (uintptr_t)two[1].buffer, .rkey = two[1].mr->rkey}};
        FAILS(post_one(&two[0], &into, wr), 0);
        wr.opcode = IBV_WR_RDMA_WRITE, wr.send_flags = IBV_SEND_FENCE, wr.wr.rdma.remote_addr += 30000;
        FAILS(post_one(&two[0], &again, wr), 0);
        for (int n = 0; n < 3; n++)
            CHECK(next_wc(two[0].send_cq).status == IBV_WC_SUCCESS, "operation %d", n);
        for (uint32_t at = 0; at < length; at++) {
            CHECK(two[0].buffer[30000 + at] == value, "byte %u of %u was read before it was written", at, length);
            CHECK(two[1].buffer[30000 + at] == value, "byte %u of %u was written before it was read", at, length);
        }
    }
    destroy_any(&two[0]);
    destroy_any(&two[1]);
}

/* Completions come in the order of the requests, whatever these are. */
static void completions(void)
{
    struct any two[2];
    connected(two, IBV_QPT_RC);
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_READ, IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_ATOMIC_FETCH_AND_ADD};
    uint64_t posted = 0, completed = 0, receives = 0, received = 0;
    while (completed < 2000) {
        while (posted < 2000 && posted < completed + 16 && receives < received + 16) {
            enum ibv_wr_opcode opcode = opcodes[posted * 7 % 4];
            struct ibv_sge sge = piece(&two[0], 0, opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? 8 : posted * 37 % 3000);
            struct ibv_send_wr wr = {.wr_id = posted, .opcode = opcode};
            if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
                wr.wr.atomic.remote_addr = (uintptr_t)two[1].buffer, wr.wr.atomic.rkey = two[1].mr->rkey;
            else
                wr.wr.rdma.remote_addr = (uintptr_t)two[1].buffer + 8, wr.wr.rdma.rkey = two[1].mr->rkey;
            if (opcode == IBV_WR_SEND)
                FAILS(receive_one(&two[1], receives++, piece(&two[1], 8192, 4096)), 0);
            FAILS(post_one(&two[0], &sge, wr), 0);
            posted++;
        }
        struct ibv_wc wc = next_wc(two[0].send_cq);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == completed, "completion %d: %s", (int)wc.wr_id, ibv_wc_status_str(wc.status));
        completed++;
        while (ibv_poll_cq(two[1].recv_cq, 1, &wc) == 1)
            CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == received++, "receive %d: %s", (int)wc.wr_id, ibv_wc_status_str(wc.status));
    }
    destroy_any(&two[0]);
    destroy_any(&two[1]);
}

/* Additions of two peers and of the program itself: none is lost. */
static void atomics(void)
{
    struct any pairs[2][2];
    for (int p = 0; p < 2; p++)
        connected(pairs[p], IBV_QPT_RC);
    struct any *owner = &pairs[0][1];
    _Atomic uint64_t *counter = (_Atomic uint64_t *)owner->buffer;
    for (int i = 0; i < 1000; i++) {
        for (int p = 0; p < 2; p++) {
            struct ibv_sge sge = piece(&pairs[p][0], 0, 8);
            struct ibv_send_wr wr = {.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
                .wr.atomic = {.remote_addr = (uintptr_t)counter, .rkey = owner->mr->rkey, .compare_add = 1}};
            FAILS(post_one(&pairs[p][0], &sge, wr), 0);
        }
        atomic_fetch_add(counter, 1);
        for (int p = 0; p < 2; p++)
            CHECK(next_wc(pairs[p][0].send_cq).status == IBV_WC_SUCCESS, "atomic");
    }
    CHECK(atomic_load(counter) == 3000, "%llu additions", (unsigned long long)atomic_load(counter));
    for (int p = 0; p < 2; p++)
        for (int i = 0; i < 2; i++)
            destroy_any(&pairs[p][i]);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"last-byte", last_byte}, {"before-completion", before_completion}, {"reads", reads}, {"completions", completions},
        {"atomics", atomics},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof *cases, &context, &pd);
}
