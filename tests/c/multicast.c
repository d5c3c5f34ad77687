/* UD multicast. Receivers say READY once they are attached; senders number their messages. Every byte, the GRH and the
 * sender are checked, and that nothing comes twice or of another group.
 *   multicast receive MGID COUNT BYTES QPS   COUNT messages, each to every one of QPS queue pairs attached
 *   multicast send MGID COUNT BYTES          as fast as they complete
 *   multicast hold MGID                      attached until it is killed
 *   multicast rules                          what attaching refuses, in one process
 * A kernel's device leaves it to others that its host joins the group: with JOIN=INTERFACE a socket of this program does.
 * Environment: DEV (ferroce_lo), GIDX (0). */
#include "verbs_pair.h"
#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#define QKEY 0x11111111
#define MULTICAST_QPN 0xffffff
#define GRH 40

static struct ibv_context *context;
static struct ibv_pd *pd;
static union ibv_gid mgid;

static union ibv_gid gid_of(const char *text)
{
    union ibv_gid gid;
    CHECK(inet_pton(AF_INET6, text, gid.raw) == 1, "%s is no GID", text);
    return gid;
}

static int gid_index(void) { return getenv("GIDX") ? atoi(getenv("GIDX")) : 0; }

/* A UD queue pair, ready to send. */
static struct ibv_qp *make_qp(struct ibv_cq *cq, int depth)
{
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD, .sq_sig_all = 1,
        .cap = {.max_send_wr = 64, .max_recv_wr = depth, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    CHECK(qp, "create_qp: %s", strerror(errno));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "to INIT");
    attr.qp_state = IBV_QPS_RTR;
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "to RTR");
    attr.qp_state = IBV_QPS_RTS;
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "to RTS");
    return qp;
}

static void start(void)
{
    context = open_device();
    pd = ibv_alloc_pd(context);
    CHECK(pd, "alloc_pd: %s", strerror(errno));
}

/* The content of a message: it depends on the group, the number and the place. */
static unsigned char content(uint32_t number, uint32_t at)
{
    return (unsigned char)(mgid.raw[15] * 31 + number * 7 + at * 13 + (at >> 8));
}

static void join_by_socket(const char *interface)
{
    static const unsigned char mapped[12] = {[10] = 0xff, [11] = 0xff};
    int rc;
    if (!memcmp(mgid.raw, mapped, sizeof(mapped))) {
        struct ip_mreqn request = {.imr_ifindex = if_nametoindex(interface)};
        memcpy(&request.imr_multiaddr, mgid.raw + 12, 4);
        rc = setsockopt(socket(AF_INET, SOCK_DGRAM, 0), IPPROTO_IP, IP_ADD_MEMBERSHIP, &request, sizeof(request));
    } else {
        struct ipv6_mreq request = {.ipv6mr_interface = if_nametoindex(interface)};
        memcpy(&request.ipv6mr_multiaddr, mgid.raw, 16);
        rc = setsockopt(socket(AF_INET6, SOCK_DGRAM, 0), IPPROTO_IPV6, IPV6_ADD_MEMBERSHIP, &request, sizeof(request));
    }
    CHECK(!rc, "joining on %s: %s", interface, strerror(errno));
}

static int next(struct ibv_cq *cq, struct ibv_wc *wc, int seconds)
{
    time_t end = time(NULL) + seconds;
    int n;
    while ((n = ibv_poll_cq(cq, 1, wc)) == 0 && time(NULL) < end)
        ;
    CHECK(n >= 0, "poll_cq: %d", n);
    CHECK(n == 0 || wc->status == IBV_WC_SUCCESS, "completion: %s", ibv_wc_status_str(wc->status));
    return n;
}

/* Which message lies in a receive buffer; the program ends if it is none of the group, or damaged. */
static uint32_t number_of(const unsigned char *buffer, const struct ibv_wc *wc, uint32_t count, uint32_t length)
{
    static const unsigned char mapped[12] = {[10] = 0xff, [11] = 0xff};
    uint32_t number;
    CHECK(wc->opcode == IBV_WC_RECV && wc->byte_len == length + GRH && wc->wc_flags & IBV_WC_GRH,
        "completion %d of %u bytes, flags %x", wc->opcode, wc->byte_len, wc->wc_flags);
    if (memcmp(mgid.raw, mapped, sizeof(mapped)))
        CHECK(buffer[0] >> 4 == 6 && !memcmp(buffer + 24, mgid.raw, 16), "the GRH is of another group");
    else
        CHECK(buffer[20] == 0x45 && !memcmp(buffer + 36, mgid.raw + 12, 4), "the IPv4 header is of another group");
    memcpy(&number, buffer + GRH, 4);
    CHECK(number < count, "message %u of %u", number, count);
    for (uint32_t at = 4; at < length; at++)
        CHECK(buffer[GRH + at] == content(number, at), "byte %u of message %u is damaged", at, number);
    CHECK(wc->src_qp == wc->imm_data, "sender %x, not %x", wc->src_qp, wc->imm_data);
    return number;
}

static void receive(int qps, uint32_t count, uint32_t length)
{
    size_t room = GRH + length, depth = count + 1;
    unsigned char *buffers = calloc(qps * depth, room);
    unsigned char *seen = calloc(qps * count, 1);
    struct ibv_cq *cq = ibv_create_cq(context, qps * (depth + 1), NULL, NULL, 0);
    CHECK(buffers && seen && cq, "no room");
    struct ibv_mr *mr = ibv_reg_mr(pd, buffers, qps * depth * room, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr, "reg_mr: %s", strerror(errno));
    struct ibv_qp *qp[qps];
    for (int q = 0; q < qps; q++) {
        qp[q] = make_qp(cq, depth);
        for (size_t i = 0; i < depth; i++) {
            struct ibv_sge sge = {.addr = (uintptr_t)(buffers + (q * depth + i) * room), .length = room, .lkey = mr->lkey};
            struct ibv_recv_wr *bad, wr = {.wr_id = q * depth + i, .sg_list = &sge, .num_sge = 1};
            CHECK(!ibv_post_recv(qp[q], &wr, &bad), "post_recv");
        }
        int rc = ibv_attach_mcast(qp[q], &mgid, 0);
        CHECK(!rc, "attach_mcast: %s", strerror(rc));
    }
    if (getenv("JOIN"))
        join_by_socket(getenv("JOIN"));
    puts("READY");
    fflush(stdout);
    struct ibv_wc wc;
    for (uint32_t i = 0; i < qps * count; i++) {
        CHECK(next(cq, &wc, 30), "%u of %u messages came", i, qps * count);
        int q = wc.wr_id / depth;
        CHECK(wc.qp_num == qp[q]->qp_num, "the receive of another QP");
        uint32_t number = number_of(buffers + wc.wr_id * room, &wc, count, length);
        CHECK(!seen[q * count + number], "message %u came twice", number);
        seen[q * count + number] = 1;
    }
    CHECK(!next(cq, &wc, 1), "a message too many");
    for (int q = 0; q < qps; q++) {
        CHECK(!ibv_detach_mcast(qp[q], &mgid, 0), "detach_mcast");
        CHECK(!ibv_destroy_qp(qp[q]), "destroy_qp: %s", strerror(errno));
    }
}

static struct ibv_ah *make_ah(union ibv_gid dgid)
{
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = dgid, .sgid_index = gid_index(), .hop_limit = 4}};
    return ibv_create_ah(pd, &attr);
}

static void post(struct ibv_qp *qp, struct ibv_ah *ah, void *data, uint32_t length, uint32_t lkey)
{
    struct ibv_sge sge = {.addr = (uintptr_t)data, .length = length, .lkey = lkey};
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = qp->qp_num,
        .wr.ud = {.ah = ah, .remote_qpn = MULTICAST_QPN, .remote_qkey = QKEY}};
    CHECK(!ibv_post_send(qp, &wr, &bad), "post_send");
}

static void send_all(uint32_t count, uint32_t length)
{
    unsigned char *data = malloc(length);
    struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
    struct ibv_mr *mr = ibv_reg_mr(pd, data, length, 0);
    struct ibv_ah *ah = make_ah(mgid);
    CHECK(data && cq && mr && ah, "no address handle, or no room: %s", strerror(errno));
    struct ibv_qp *qp = make_qp(cq, 1);
    for (uint32_t number = 0; number < count; number++) {
        struct ibv_wc wc;
        for (uint32_t at = 0; at < length; at++)
            data[at] = content(number, at);
        memcpy(data, &number, 4);
        post(qp, ah, data, length, mr->lkey);
        CHECK(next(cq, &wc, 10), "the send does not complete");
    }
    CHECK(!ibv_destroy_ah(ah), "destroy_ah");
}

/* What one process can be told without a network, and that a sender which is attached hears itself. */
static void rules(void)
{
    struct ibv_device_attr limits;
    CHECK(!ibv_query_device(context, &limits), "query_device");
    CHECK(limits.max_mcast_grp > 0 && limits.max_mcast_qp_attach > 1 && limits.max_total_mcast_qp_attach >= limits.max_mcast_grp,
        "limits %d %d %d", limits.max_mcast_grp, limits.max_mcast_qp_attach, limits.max_total_mcast_qp_attach);
    struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
    struct ibv_qp *qp = make_qp(cq, 8), *other = make_qp(cq, 8);
    union ibv_gid first = gid_of("::ffff:239.7.0.0"), second = gid_of("ff0e::7:1"), unicast = gid_of("::ffff:10.0.0.1");
    int rc;
#define GIVES(call, expected) CHECK((rc = (call)) == (expected), "%s gives %d (%s)", #call, rc, strerror(rc))
    GIVES(ibv_attach_mcast(qp, &unicast, 0), EINVAL);
    GIVES(ibv_detach_mcast(qp, &first, 0), EINVAL);
    GIVES(ibv_attach_mcast(qp, &first, 0), 0);
    GIVES(ibv_attach_mcast(qp, &first, 0), 0);
    GIVES(ibv_attach_mcast(qp, &second, 0), 0);
    GIVES(ibv_detach_mcast(other, &first, 0), EINVAL);
    GIVES(ibv_attach_mcast(other, &first, 0), 0);
    GIVES(ibv_destroy_qp(qp), EBUSY);
    GIVES(ibv_detach_mcast(qp, &first, 0), 0);
    GIVES(ibv_detach_mcast(qp, &first, 0), EINVAL);
    GIVES(ibv_destroy_qp(qp), EBUSY);
    GIVES(ibv_detach_mcast(qp, &second, 0), 0);
    GIVES(ibv_detach_mcast(other, &first, 0), 0);
    struct ibv_qp_init_attr rc_init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_recv_wr = 1}};
    struct ibv_qp *rc_qp = ibv_create_qp(pd, &rc_init);
    CHECK(rc_qp, "create_qp");
    GIVES(ibv_attach_mcast(rc_qp, &first, 0), EINVAL);

    union ibv_gid group = first;
    for (int n = 0; n < limits.max_mcast_grp; n++, group.raw[15]++)
        GIVES(ibv_attach_mcast(qp, &group, 0), 0);
    GIVES(ibv_attach_mcast(qp, &group, 0), ENOMEM);
    GIVES(ibv_attach_mcast(other, &first, 0), 0);
    GIVES(ibv_detach_mcast(other, &first, 0), 0);
    while (group.raw[15]-- > 0)
        GIVES(ibv_detach_mcast(qp, &group, 0), 0);

    /* RDMA CM's other name of an IPv4 group leads to the same one. */
    union ibv_gid alias = gid_of("ff0e::ffff:239.7.0.0");
    unsigned char data[8], buffer[GRH + 8];
    struct ibv_mr *mr = ibv_reg_mr(pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE), *data_mr = ibv_reg_mr(pd, data, 8, 0);
    struct ibv_sge sge = {.addr = (uintptr_t)buffer, .length = sizeof(buffer), .lkey = mr->lkey};
    struct ibv_recv_wr *bad, wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1};
    struct ibv_ah *ah = make_ah(alias);
    CHECK(ah, "create_ah: %s", strerror(errno));
    GIVES(ibv_attach_mcast(qp, &first, 0), 0);
    GIVES(ibv_post_recv(qp, &wr, &bad), 0);
    mgid = first;
    for (uint32_t at = 0; at < 8; at++)
        data[at] = at < 4 ? 0 : content(0, at);
    post(qp, ah, data, 8, data_mr->lkey);
    for (int received = 0, n = 0; n < 2; n++) {
        struct ibv_wc wc;
        CHECK(next(cq, &wc, 10), "no completion");
        received += wc.opcode == IBV_WC_RECV;
        CHECK(wc.opcode != IBV_WC_RECV || number_of(buffer, &wc, 1, 8) == 0, "another message");
        CHECK(n == 0 || received == 1, "it does not hear itself");
    }
    GIVES(ibv_detach_mcast(qp, &alias, 0), 0);
    GIVES(ibv_destroy_qp(qp), 0);
    GIVES(ibv_destroy_qp(other), 0);
}

int main(int argc, char **argv)
{
    CHECK(argc >= 2, "what?");
    const char *what = argv[1];
    if (argc > 2)
        mgid = gid_of(argv[2]);
    start();
    if (!strcmp(what, "receive") && argc == 6) {
        receive(atoi(argv[5]), atoi(argv[3]), atoi(argv[4]));
    } else if (!strcmp(what, "send") && argc == 5) {
        send_all(atoi(argv[3]), atoi(argv[4]));
    } else if (!strcmp(what, "hold") && argc == 3) {
        struct ibv_qp *qp = make_qp(ibv_create_cq(context, 2, NULL, NULL, 0), 1);
        CHECK(!ibv_attach_mcast(qp, &mgid, 0), "attach_mcast");
        puts("READY");
        fflush(stdout);
        pause();
    } else if (!strcmp(what, "rules")) {
        rules();
    } else {
        die("what?");
    }
    return 0;
}
