/* datagrams CASE: the rules of UD: Q_Keys, address handles, what a completion and the header in front of the data tell. */
#include "verbs_any.h"
#include <arpa/inet.h>

static struct ibv_context *context;
static struct ibv_pd *pd;

static void send_to(struct any *from, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey, uint32_t length)
{
    struct ibv_sge sge = piece(from, 8192, length);
    struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .wr.ud = {.ah = ah, .remote_qpn = qpn, .remote_qkey = qkey}};
    FAILS(post_one(from, &sge, wr), 0);
    struct ibv_wc wc = next_wc(from->send_cq);
    CHECK(wc.status == IBV_WC_SUCCESS, "send: %s", ibv_wc_status_str(wc.status));
}

/* A UD queue pair in RTS with this Q_Key. */
static struct any with_key(uint32_t qkey)
{
    struct any any = make_any(context, pd, IBV_QPT_UD);
    struct ibv_qp_attr attr = good_attr(context, 0);
    attr.qkey = qkey;
    take_to(&any, IBV_QPS_RTS, attr);
    return any;
}

/* What is dropped leaves no completion: the next datagram, which is not, takes the receive. */
static void keys(void)
{
    struct any from = with_key(0x2222), to = with_key(0x1111), same = with_key(0x2222), high = with_key(0x80003333);
    struct ibv_ah *ah = handle_to(pd, good_attr(context, 0));
    static const struct { uint32_t qkey; int to_same, arrives; } tries[] = {
        {0x1111, 0, 1}, {0x1112, 0, 0}, {0x80001111, 0, 0} /* the sender's own */, {0x80000000, 1, 1}, {0xffffffff, 1, 1},
        {0x2222, 1, 1}, {0, 1, 0},
    };
    for (size_t i = 0; i < sizeof(tries) / sizeof(tries[0]); i++) {
        struct any *receiver = tries[i].to_same ? &same : &to;
        FAILS(receive_one(receiver, i, piece(receiver, 0, 100)), 0);
        send_to(&from, ah, receiver->qp->qp_num, tries[i].qkey, 10 + i);
        if (!tries[i].arrives)
            send_to(&from, ah, receiver->qp->qp_num, tries[i].to_same ? 0x2222 : 0x1111, 50);
        struct ibv_wc wc = next_wc(receiver->recv_cq);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == i && wc.byte_len == 40 + (tries[i].arrives ? 10 + i : 50), "%zu: %u bytes",
            i, wc.byte_len);
    }
    /* A QP whose own key has the high bit: only with that bit can it be named, and then the sender's own is meant. */
    FAILS(receive_one(&high, 1, piece(&high, 0, 100)), 0);
    send_to(&from, ah, high.qp->qp_num, 0x80003333, 10);
    send_to(&high, ah, high.qp->qp_num, 0x80000000, 20);
    CHECK(next_wc(high.recv_cq).byte_len == 60, "another datagram arrives");
    /* QPs of other types, in other states, and none. */
    struct any rc = make_any(context, pd, IBV_QPT_RC), early = make_any(context, pd, IBV_QPT_UD);
    struct ibv_qp_attr attr = good_attr(context, from.qp->qp_num);
    take_to(&rc, IBV_QPS_RTS, attr);
    attr.qkey = 0x1111;
    take_to(&early, IBV_QPS_INIT, attr);
    FAILS(receive_one(&rc, 1, piece(&rc, 0, 100)), 0);
    FAILS(receive_one(&early, 1, piece(&early, 0, 100)), 0);
    send_to(&from, ah, rc.qp->qp_num, 0x1111, 10);
    send_to(&from, ah, early.qp->qp_num, 0x1111, 10);
    send_to(&from, ah, from.qp->qp_num ^ 1, 0x1111, 10);
    FAILS(receive_one(&to, 9, piece(&to, 0, 100)), 0);
    send_to(&from, ah, to.qp->qp_num, 0x1111, 11);
    CHECK(next_wc(to.recv_cq).wr_id == 9, "what follows"); /* it came after the others */
    struct ibv_wc wc;
    CHECK(ibv_poll_cq(rc.recv_cq, 1, &wc) == 0 && ibv_poll_cq(early.recv_cq, 1, &wc) == 0, "it arrives where it must not");
    FAILS(ibv_destroy_ah(ah), 0);
    struct any *all[] = {&from, &to, &same, &high, &rc, &early};
    for (int i = 0; i < 6; i++)
        destroy_any(all[i]);
}

static void handles(void)
{
    struct ibv_port_attr port;
    FAILS(ibv_query_port(context, 1, &port), 0);
    struct ibv_qp_attr good = good_attr(context, 0);
#define WRONG(change) do { struct ibv_ah_attr attr = good.ah_attr; change; MAKES_NOTHING(ibv_create_ah(pd, &attr), EINVAL); } while (0)
    WRONG(attr.is_global = 0);
    WRONG(attr.port_num = 0);
    WRONG(attr.port_num = 2);
    WRONG(attr.grh.sgid_index = 200); /* not in use */
    WRONG(memset(&attr.grh.dgid, 0, 16));
    WRONG(memset(&attr.grh.dgid, 0, 16); attr.grh.dgid.raw[10] = attr.grh.dgid.raw[11] = 0xff); /* 0.0.0.0 */
    for (int i = 0; i < 1000; i++)
        FAILS(ibv_destroy_ah(handle_to(pd, good)), 0);
}

/* A datagram to oneself over the GID `index`, and the header in front of it: that of RoCE v2, as which even what leaves
 * from a GID of v1 gets there. The way back is then the same GID of v2, `back_index`. */
static void header_of(int index, int back_index)
{
    struct any any = with_key(QKEY);
    struct ibv_qp_attr attr = good_attr(context, 0);
    FAILS(ibv_query_gid(context, 1, index, &attr.ah_attr.grh.dgid), 0);
    attr.ah_attr.grh.sgid_index = index, attr.ah_attr.grh.hop_limit = 17, attr.ah_attr.grh.traffic_class = 0x28;
    attr.ah_attr.sl = 3;
    struct ibv_ah *ah = handle_to(pd, attr);
    memset(any.buffer, 0xee, 200);
    memset(any.buffer + 8192, 0x5a, 61);
    FAILS(receive_one(&any, 1, piece(&any, 0, 200)), 0);
    send_to(&any, ah, any.qp->qp_num, QKEY, 61);
    struct ibv_wc wc = next_wc(any.recv_cq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.byte_len == 101, "%u bytes", wc.byte_len);
    CHECK(wc.src_qp == any.qp->qp_num && wc.qp_num == any.qp->qp_num && wc.wc_flags == IBV_WC_GRH, "flags %#x", wc.wc_flags);
    CHECK(wc.slid == 0 && wc.dlid_path_bits == 0 && wc.pkey_index == 0 && wc.vendor_err == 0, "IB's fields");
    CHECK(!memcmp(any.buffer + 40, any.buffer + 8192, 61) && any.buffer[101] == 0xee, "data");
    unsigned char *gid = attr.ah_attr.grh.dgid.raw, *header = any.buffer;
    int v4 = !memcmp(gid, "\0\0\0\0\0\0\0\0\0\0\xff\xff", 12);
    CHECK((wc.sl & 7) == (v4 ? 2 : 1), "sl %u does not tell which header it is, as on hardware", wc.sl);
    if (v4) {
        unsigned char *ip = header + 20;
        uint32_t sum = 0;
        for (int i = 0; i < 20; i += 2)
            sum += ip[i] << 8 | ip[i + 1];
        CHECK((sum & 0xffff) + (sum >> 16) == 0xffff, "the checksum of the IPv4 header");
        CHECK(ip[0] == 0x45 && ip[1] == 0x28 && ip[8] == 17 && ip[9] == 17, "TOS %#x, TTL %u, protocol %u", ip[1], ip[8], ip[9]);
        CHECK(!memcmp(ip + 12, gid + 12, 4) && !memcmp(ip + 16, gid + 12, 4), "addresses");
    } else {
        CHECK(header[0] >> 4 == 6 && header[6] == 17 && header[7] == 17, "version %u, next header %u, hop limit %u",
            header[0] >> 4, header[6], header[7]);
        CHECK(((header[0] & 15) << 4 | header[1] >> 4) == 0x28, "traffic class");
        CHECK(!memcmp(header + 8, gid, 16) && !memcmp(header + 24, gid, 16), "addresses");
    }
    struct ibv_ah_attr back;
    memset(&back, 0xff, sizeof(back));
    FAILS(ibv_init_ah_from_wc(context, 1, &wc, (struct ibv_grh *)header, &back), 0);
    CHECK(back.is_global == 1 && back.port_num == 1 && back.grh.sgid_index == back_index && !memcmp(&back.grh.dgid, gid, 16),
        "the way back: GID index %u", back.grh.sgid_index);
    CHECK(back.grh.traffic_class == 0x28, "the way back: traffic class %#x", back.grh.traffic_class);
    FAILS(ibv_destroy_ah(ah), 0);
    ah = ibv_create_ah_from_wc(pd, &wc, (struct ibv_grh *)header, 1);
    CHECK(ah, "create_ah_from_wc: %s", strerror(errno));
    FAILS(receive_one(&any, 2, piece(&any, 0, 200)), 0);
    send_to(&any, ah, wc.src_qp, QKEY, 5);
    CHECK(next_wc(any.recv_cq).byte_len == 45, "the answer");
    FAILS(ibv_destroy_ah(ah), 0);
    destroy_any(&any);
}

static void headers(void)
{
    struct ibv_gid_entry table[64];
    ssize_t count = ibv_query_gid_table(context, table, 64, 0);
    CHECK(count > 0, "query_gid_table: %zd", count);
    for (ssize_t i = 0; i < count; i++) {
        ssize_t back = 0;
        while (back < count && (table[back].gid_type != IBV_GID_TYPE_ROCE_V2 || memcmp(&table[back].gid, &table[i].gid, 16)))
            back++;
        CHECK(back < count, "GID %u is not there as RoCE v2", table[i].gid_index);
        header_of(table[i].gid_index, table[back].gid_index);
    }
}

/* As large as the MTU, with immediate data, in pieces. */
static void sizes(void)
{
    struct ibv_port_attr port;
    FAILS(ibv_query_port(context, 1, &port), 0);
    uint32_t mtu = 128u << port.active_mtu;
    struct any from = with_key(QKEY), to = with_key(QKEY);
    struct ibv_ah *ah = handle_to(pd, good_attr(context, 0));
    for (uint32_t i = 0; i < mtu; i++)
        from.buffer[8192 + i] = (unsigned char)(i * 13);
    for (uint32_t length = 0; length <= mtu; length += length < 8 ? 1 : 511) {
        uint32_t size = length + 511 > mtu && length > 8 ? mtu : length;
        /* The header and the data are cut at another place each time. */
        struct ibv_sge two[2] = {piece(&to, 0, 20 + size / 2), piece(&to, 20000, 20 + size - size / 2)};
        struct ibv_recv_wr *bad, wr = {.sg_list = two, .num_sge = 2};
        FAILS(ibv_post_recv(to.qp, &wr, &bad), 0);
        struct ibv_sge sge = piece(&from, 8192, size);
        struct ibv_send_wr send = {.opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htonl(size),
            .wr.ud = {.ah = ah, .remote_qpn = to.qp->qp_num, .remote_qkey = QKEY}};
        FAILS(post_one(&from, &sge, send), 0);
        CHECK(next_wc(from.send_cq).status == IBV_WC_SUCCESS, "send");
        struct ibv_wc wc = next_wc(to.recv_cq);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == 40 + size && wc.imm_data == htonl(size) &&
            wc.wc_flags == (IBV_WC_GRH | IBV_WC_WITH_IMM), "%u bytes: %s", size, ibv_wc_status_str(wc.status));
        unsigned char got[8192];
        memcpy(got, to.buffer, two[0].length);
        memcpy(got + two[0].length, to.buffer + 20000, two[1].length);
        CHECK(!memcmp(got + 40, from.buffer + 8192, size), "the data of %u bytes", size);
    }
    FAILS(ibv_destroy_ah(ah), 0);
    destroy_any(&from);
    destroy_any(&to);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"keys", keys}, {"handles", handles}, {"headers", headers}, {"sizes", sizes},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof *cases, &context, &pd);
}
