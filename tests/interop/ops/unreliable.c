/* Cases of UC and UD. */
#include "ops.h"
#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

enum { HOPS = 33 };
static struct flow flow;

static void uc_sizes(struct session *s, enum ibv_wr_opcode opcode)
{
    struct options options = defaults(s, IBV_QPT_UC);
    struct pair *pair = make_pair(s, &options);
    uint32_t mtu = (uint32_t)s->mtu;
    const uint32_t lengths[] = {0, 1, 3, 64, mtu - 1, mtu, mtu + 1, 2 * mtu, 3 * mtu - 2, 10 * mtu + 5, 32768};
    flow.count = 0;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        add(s, &flow, opcode, lengths[i]);
        flow.messages[i].gather = flow.messages[i].scatter = 1 + (int)i % 3;
    }
    add(s, &flow, IBV_WR_RDMA_WRITE_WITH_IMM, 1); /* the responder knows by it that all have come */
    run_flow(s, pair, &flow);
}

static void uc_send(struct session *s) { uc_sizes(s, IBV_WR_SEND); }
static void uc_send_imm(struct session *s) { uc_sizes(s, IBV_WR_SEND_WITH_IMM); }
static void uc_write(struct session *s) { uc_sizes(s, IBV_WR_RDMA_WRITE); }
static void uc_write_imm(struct session *s) { uc_sizes(s, IBV_WR_RDMA_WRITE_WITH_IMM); }

/* On a network that loses packets, messages are lost, but none is damaged, doubled or out of order. */
static void uc_lossy(struct session *s)
{
    enum { COUNT = 120 };
    struct options options = defaults(s, IBV_QPT_UC);
    struct pair *pair = make_pair(s, &options);
    uint32_t length = 3 * (uint32_t)s->mtu - 7;
    size_t stride = (size_t)length + 57;
    memset(s->in.bytes, BLANK, COUNT * stride);
    for (unsigned i = 0; i < COUNT; i++) {
        struct ibv_sge place = entry(&s->in, i * stride, length);
        fill_pattern(s->out.bytes + i * stride, length, i, s->number);
        if (!s->requester)
            post_receive(s, pair, i, &place, 1);
    }
    uint8_t *expected = malloc(length);
    MUST(expected, "no memory");
    sync_peer(s);
    if (s->requester)
        for (unsigned i = 0; i < COUNT; i++) {
            struct ibv_sge from = entry(&s->out, i * stride, length);
            struct ibv_send_wr wr = {.wr_id = i, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM,
                .send_flags = IBV_SEND_SIGNALED, .imm_data = htonl(i)};
            post(s, pair, &wr);
            expect_status(s, pair, pair->send_cq, i, IBV_WC_SUCCESS);
        }
    sync_peer(s);
    if (!s->requester) {
        int last = -1, count = 0;
        struct ibv_wc wc;
        for (double end = now() + 0.5; now() < end;) {
            if (!try_completion(s, pair->recv_cq, &wc))
                continue;
            unsigned message = ntohl(wc.imm_data);
            check_completion(s, pair, &wc, &(struct expected){.wr_id = (uint64_t)count, .opcode = IBV_WC_RECV, .length = length,
                .flags = IBV_WC_WITH_IMM, .imm = wc.imm_data, .source = ANY});
            MUST((int)message > last && message < COUNT, "message %u after %d", message, last);
            fill_pattern(expected, length, message, s->number);
            MUST(!memcmp(s->in.bytes + (size_t)count * stride, expected, length), "message %u is damaged", message);
            last = (int)message, count++;
        }
        MUST(count >= COUNT / 4, "only %d of %d messages arrive", count, COUNT);
    }
    free(expected);
    sync_peer(s);
}

static struct pair *datagrams(struct session *s)
{
    struct options options = defaults(s, IBV_QPT_UD);
    return make_pair(s, &options);
}

static struct ibv_ah *handle_to(struct session *s, const union ibv_gid *gid)
{
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = *gid, .sgid_index = (uint8_t)s->gid_index, .hop_limit = HOPS, .traffic_class = 0x20}};
    struct ibv_ah *ah = ibv_create_ah(s->pd, &attr);
    MUST(ah, "create_ah: %s", strerror(errno));
    return ah;
}

static void send_datagram(struct session *s, struct pair *pair, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey, unsigned index, uint32_t length, bool imm)
{
    struct ibv_sge from = entry(&s->out, 64, length);
    fill_pattern(s->out.bytes + 64, length, index, s->number);
    struct ibv_send_wr wr = {.wr_id = index, .sg_list = &from, .num_sge = 1, .opcode = imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND,
        .send_flags = IBV_SEND_SIGNALED, .imm_data = htonl(index), .wr.ud = {.ah = ah, .remote_qpn = qpn, .remote_qkey = qkey}};
    post(s, pair, &wr);
    expect(s, pair, pair->send_cq, &(struct expected){.wr_id = index, .opcode = IBV_WC_SEND, .length = ANY});
}

/* Whether the GID with that index is of RoCE v1. */
static bool is_rocev1(struct session *s, uint32_t index)
{
    struct ibv_gid_entry entry;
    MUST(!ibv_query_gid_ex(s->context, 1, index, &entry, 0), "query_gid_ex: %s", strerror(errno));
    return entry.gid_type == IBV_GID_TYPE_ROCE_V1;
}

/* Whether a datagram came by RoCE v1: what lies in front of it is a GRH then. */
static bool came_by_v1(struct session *s, const uint8_t *grh)
{
    return is_rocev1(s, (uint32_t)s->gid_index) && grh[0] >> 4 == 6 && grh[6] == 0x1b;
}

/* What lies in front of a datagram: the IP header or the GRH it came with. */
static void check_grh(struct session *s, const uint8_t *grh, const union ibv_gid *from, const union ibv_gid *to, uint32_t length, bool imm)
{
    /* UDP, BTH, DETH, immediate data, payload and pad, ICRC */
    uint32_t datagram = 8 + 12 + 8 + (imm ? 4 : 0) + (length + 3) / 4 * 4 + 4;
    bool v1 = came_by_v1(s, grh);
    if (v1)
        datagram -= 8;
    bool v4 = !v1 && !memcmp(from->raw, "\0\0\0\0\0\0\0\0\0\0\xff\xff", 12);
    /* For rxe the kernel puts the hop limit of the route in the place of the handle's, except to groups. */
    bool group = v4 ? to->raw[12] >> 4 == 0xe : to->raw[0] == 0xff;
    int hops = s->peer_rxe && !group ? 64 : HOPS;
    const uint8_t *ip = v4 ? grh + 20 : grh;
    uint32_t total = (uint32_t)(v4 ? ip[2] << 8 | ip[3] : ip[4] << 8 | ip[5]);
    MUST(total == datagram + (v4 ? 20 : 0), "the header in front of the datagram says %u bytes, not %u", total, datagram);
    if (v4) {
        MUST(ip[0] == 0x45 && ip[8] == hops && ip[9] == 17, "IPv4 header %02x, TTL %d, protocol %d", ip[0], ip[8], ip[9]);
        MUST((ip[1] & 0xfc) == 0x20, "type of service %#x", ip[1]);
        MUST(!memcmp(ip + 12, from->raw + 12, 4) && !memcmp(ip + 16, to->raw + 12, 4), "IPv4 addresses in front of the datagram");
        uint32_t sum = 0;
        for (int i = 0; i < 20; i += 2)
            sum += (uint32_t)(ip[i] << 8 | ip[i + 1]);
        sum = (sum & 0xffff) + (sum >> 16);
        MUST((sum & 0xffff) + (sum >> 16) == 0xffff, "the IPv4 header's checksum is wrong");
    } else {
        MUST(ip[0] >> 4 == 6 && ip[6] == (v1 ? 0x1b : 17) && ip[7] == hops, "IPv6 header %02x, next header %d, hop limit %d", ip[0], ip[6], ip[7]);
        MUST(((ip[0] << 4 | ip[1] >> 4) & 0xfc) == 0x20, "traffic class %02x%02x", ip[0], ip[1]);
        MUST(!memcmp(ip + 8, from->raw, 16) && !memcmp(ip + 24, to->raw, 16), "IPv6 addresses in front of the datagram");
    }
}

/* Receives datagram `index` into the place that its receive has, and checks all of it. */
static void take_datagram(struct session *s, struct pair *pair, const union ibv_gid *to, unsigned index, uint32_t length, bool imm, uint64_t wr_id, size_t place, struct ibv_wc *wc)
{
    next_completion(s, pair->recv_cq, wc);
    check_completion(s, pair, wc, &(struct expected){.wr_id = wr_id, .opcode = IBV_WC_RECV, .length = length + GRH,
        .flags = IBV_WC_GRH | (imm ? IBV_WC_WITH_IMM : 0), .imm = htonl(index), .source = pair->remote.qpn});
    check_grh(s, s->in.bytes + place, &pair->remote.gid, to, length, imm);
    uint8_t expected[4096];
    fill_pattern(expected, length, index, s->number);
    MUST(!memcmp(s->in.bytes + place + GRH, expected, length), "datagram %u is damaged", index);
    MUST(s->in.bytes[place + GRH + length] == BLANK, "something lies behind datagram %u", index);
}

static void ud_sizes(struct session *s, bool imm)
{
    struct pair *pair = datagrams(s);
    uint32_t mtu = (uint32_t)s->mtu;
    const uint32_t lengths[] = {0, 1, 2, 3, 4, 64, 255, mtu - 1, mtu};
    enum { COUNT = sizeof lengths / sizeof *lengths, STRIDE = 4096 + 128 };
    memset(s->in.bytes, BLANK, COUNT * STRIDE);
    for (int i = 0; i < COUNT; i++) {
        /* The header in an entry of its own, or not, or cut in two. */
        size_t at = (size_t)i * STRIDE;
        uint32_t cut = i % 3 == 0 ? 40 : i % 3 == 1 ? 13 : 41;
        struct ibv_sge places[] = {entry(&s->in, at, cut), entry(&s->in, at + cut, 4096 + 40 - cut)};
        if (!s->requester)
            post_receive(s, pair, (uint64_t)i, places, 2);
    }
    sync_peer(s);
    struct ibv_ah *ah = handle_to(s, &pair->remote.gid);
    for (unsigned i = 0; i < COUNT; i++) {
        struct ibv_wc wc;
        if (s->requester)
            /* With the high bit the QP's own Q_Key is meant; rxe sends it as it is. */
            send_datagram(s, pair, ah, pair->remote.qpn, i % 2 || s->rxe ? QKEY : 0x80000000, i, lengths[i], imm);
        else
            take_datagram(s, pair, &s->gid, i, lengths[i], imm, i, i * STRIDE, &wc);
    }
    sync_peer(s);
    ibv_destroy_ah(ah);
}

static void ud_send(struct session *s) { ud_sizes(s, false); }
static void ud_send_imm(struct session *s) { ud_sizes(s, true); }

/* The receiver answers with what the completion tells of the sender. */
static void ud_answer(struct session *s)
{
    struct pair *pair = datagrams(s);
    struct ibv_sge place = entry(&s->in, 0, 200);
    memset(s->in.bytes, BLANK, 400);
    struct ibv_wc wc;
    post_receive(s, pair, 1, &place, 1);
    sync_peer(s);
    if (s->requester) {
        struct ibv_ah *ah = handle_to(s, &pair->remote.gid);
        send_datagram(s, pair, ah, pair->remote.qpn, QKEY, 1, 100, false);
        next_completion(s, pair->recv_cq, &wc);
        check_completion(s, pair, &wc, &(struct expected){.wr_id = 1, .opcode = IBV_WC_RECV, .length = 77 + GRH, .flags = IBV_WC_GRH, .source = pair->remote.qpn});
        ibv_destroy_ah(ah);
    } else {
        take_datagram(s, pair, &s->gid, 1, 100, false, 1, 0, &wc);
        struct ibv_ah_attr back;
        MUST(!ibv_init_ah_from_wc(s->context, 1, &wc, (struct ibv_grh *)s->in.bytes, &back), "init_ah_from_wc: %s", strerror(errno));
        MUST(is_rocev1(s, back.grh.sgid_index) == came_by_v1(s, s->in.bytes), "it is answered by the other RoCE version");
        struct ibv_ah *ah = ibv_create_ah_from_wc(s->pd, &wc, (struct ibv_grh *)s->in.bytes, 1);
        MUST(ah, "create_ah_from_wc: %s", strerror(errno));
        send_datagram(s, pair, ah, wc.src_qp, QKEY, 2, 77, false);
        ibv_destroy_ah(ah);
    }
    sync_peer(s);
}

/* A wrong Q_Key, and a QP that does not exist: those datagrams are dropped, and take no receive. */
static void ud_dropped(struct session *s)
{
    struct pair *pair = datagrams(s);
    struct ibv_sge place = entry(&s->in, 0, 200);
    memset(s->in.bytes, BLANK, 400);
    if (!s->requester)
        post_receive(s, pair, 7, &place, 1);
    sync_peer(s);
    struct ibv_wc wc;
    struct ibv_ah *ah = handle_to(s, &pair->remote.gid);
    if (s->requester) {
        send_datagram(s, pair, ah, pair->remote.qpn, QKEY + 1, 1, 100, false);
        send_datagram(s, pair, ah, pair->remote.qpn ^ 1, QKEY, 2, 100, false);
        send_datagram(s, pair, ah, pair->remote.qpn, QKEY, 3, 100, false);
    } else {
        take_datagram(s, pair, &s->gid, 3, 100, false, 7, 0, &wc);
        expect_nothing(s, pair->recv_cq, 20);
    }
    sync_peer(s);
    ibv_destroy_ah(ah);
}

/* A group that both sides are in: the sender's copy of its own datagrams is not asked for. */
static void ud_multicast(struct session *s)
{
    bool v4 = !memcmp(s->gid.raw, "\0\0\0\0\0\0\0\0\0\0\xff\xff", 12);
    union ibv_gid group = {.raw = {[10] = 0xff, 0xff, 239, 7, 7, 1}};
    if (!v4)
        inet_pton(AF_INET6, "ff0e::4791:1", group.raw);
    if (is_rocev1(s, (uint32_t)s->gid_index)) {
        struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = group, .sgid_index = (uint8_t)s->gid_index}};
        MUST(!ibv_create_ah(s->pd, &attr) && errno == EINVAL, "create_ah to a group over RoCE v1: %s", strerror(errno));
        skip(s, "groups are of RoCE v2");
    }
    struct pair *pair = datagrams(s);
    memset(s->in.bytes, BLANK, 4 * 400);
    int join = -1, rc = 0;
    if (!s->requester) {
        rc = ibv_attach_mcast(pair->qp, &group, 0);
        if (rc == EOPNOTSUPP || rc == ENOSYS)
            skip(s, "the device attaches to no multicast group");
        MUST(!rc, "attach_mcast: %s", strerror(rc));
        if (s->rxe) { /* attaching does not let the group's packets through its IP stack */
            char name[IF_NAMESIZE] = "eth0";
            join = socket(v4 ? AF_INET : AF_INET6, SOCK_DGRAM, 0);
            struct ip_mreqn four = {.imr_ifindex = (int)if_nametoindex(name)};
            struct ipv6_mreq six = {.ipv6mr_interface = if_nametoindex(name)};
            memcpy(&four.imr_multiaddr, group.raw + 12, 4);
            memcpy(&six.ipv6mr_multiaddr, group.raw, 16);
            rc = v4 ? setsockopt(join, IPPROTO_IP, IP_ADD_MEMBERSHIP, &four, sizeof four) : setsockopt(join, IPPROTO_IPV6, IPV6_JOIN_GROUP, &six, sizeof six);
            MUST(!rc, "joining the group: %s", strerror(errno));
        }
        for (size_t i = 0; i < 4; i++) {
            struct ibv_sge place = entry(&s->in, i * 400, 300);
            post_receive(s, pair, i, &place, 1);
        }
    }
    sync_peer(s);
    struct ibv_ah *ah = handle_to(s, &group);
    for (unsigned i = 0; i < 4; i++) {
        struct ibv_wc wc;
        if (s->requester)
            send_datagram(s, pair, ah, 0xffffff, QKEY, i, 64 * i, i % 2);
        else
            take_datagram(s, pair, &group, i, 64 * i, i % 2, i, i * 400, &wc);
    }
    sync_peer(s);
    if (!s->requester) {
        rc = ibv_detach_mcast(pair->qp, &group, 0);
        MUST(!rc, "detach_mcast: %s", strerror(rc));
        close(join);
    }
    ibv_destroy_ah(ah);
    sync_peer(s);
}

const struct test unreliable_tests[] = {
    {"uc/send", uc_send}, {"uc/send-imm", uc_send_imm}, {"uc/write", uc_write}, {"uc/write-imm", uc_write_imm},
    {"ud/send", ud_send}, {"ud/send-imm", ud_send_imm}, {"ud/answer", ud_answer}, {"ud/dropped", ud_dropped},
    {"ud/multicast", ud_multicast}, {"lossy/uc", uc_lossy}, {NULL, NULL},
};
