/* Datagrams by RDMA CM: the peer's queue pair and Q_Key, refusal, and multicast groups. */
#include "cm.h"

enum { GRH = 40, REQUEST_DATA = 180, REPLY_DATA = 136 };

static unsigned char bytes[512];
static struct ibv_mr *mr_of(struct rdma_cm_id *id)
{
    struct ibv_mr *mr = rdma_reg_msgs(id, bytes, sizeof bytes);
    CHECK(mr, "reg_msgs: %s", strerror(errno));
    return mr;
}

/* Awaits a datagram of that byte. */
static void received(struct rdma_cm_id *id, unsigned char *buffer, unsigned char wanted)
{
    struct ibv_wc wc;
    CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS, "receive: %s", ibv_wc_status_str(wc.status));
    SAME(wc.byte_len, GRH + 64);
    CHECK(wc.wc_flags & IBV_WC_GRH, "no GRH");
    for (int i = 0; i < 64; i++)
        CHECK(buffer[GRH + i] == wanted, "byte %d is %d", i, buffer[GRH + i]);
}

static void send_to(struct rdma_cm_id *from, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey, unsigned char value)
{
    unsigned char *out = bytes + 448;
    struct ibv_mr *mr = rdma_reg_msgs(from, out, 64);
    memset(out, value, 64);
    struct ibv_sge sge = {(uintptr_t)out, 64, mr->lkey};
    struct ibv_send_wr *bad, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
        .wr.ud = {.ah = ah, .remote_qpn = qpn, .remote_qkey = qkey}};
    FAILS(ibv_post_send(from->qp, &wr, &bad), 0);
    struct ibv_wc wc;
    CHECK(rdma_get_send_comp(from, &wc) == 1 && wc.status == IBV_WC_SUCCESS, "send: %s", ibv_wc_status_str(wc.status));
    WORKS(rdma_dereg_mr(mr));
}

static void resolve_peer(void)
{
    const char *all[] = {own_ip(), own_ip6()};
    for (int i = 0; i < 2; i++) {
        unsigned char data[256];
        for (int j = 0; j < 256; j++)
            data[j] = j + 1;
        struct rdma_conn_param param = {.private_data = data, .private_data_len = REQUEST_DATA};
        struct connection c = new_request(RDMA_PS_UDP, all[i], &param);
        SAME(c.request.event.param.ud.private_data_len, REQUEST_DATA);
        CHECK(!memcmp(c.request.data, data, REQUEST_DATA), "other private data");
        param.private_data_len = REPLY_DATA;
        new_qp(c.passive);
        param.qp_num = c.passive->qp->qp_num;
        struct ibv_mr *mr = mr_of(c.passive);
        WORKS(rdma_post_recv(c.passive, NULL, bytes, 256, mr));
        WORKS(rdma_accept(c.passive, &param));
        struct told told = next_told(c.active_channel, ESTABLISHED);
        SAME(told.event.status, 0);
        SAME(told.event.param.ud.private_data_len, REPLY_DATA);
        CHECK(!memcmp(told.data, data, REPLY_DATA), "other private data");
        SAME(told.event.param.ud.qp_num, c.passive->qp->qp_num);
        SAME(told.event.param.ud.qkey, RDMA_UDP_QKEY);
        SAME(told.event.param.ud.ah_attr.is_global, 1);
        SAME(told.event.param.ud.ah_attr.port_num, 1);
        CHECK(!memcmp(&told.event.param.ud.ah_attr.grh.dgid, &c.active->route.addr.addr.ibaddr.dgid, 16), "another GID");
        struct ibv_qp_attr attr;
        struct ibv_qp_init_attr init;
        FAILS(ibv_query_qp(c.active->qp, &attr, IBV_QP_STATE | IBV_QP_QKEY, &init), 0);
        SAME(attr.qp_state, IBV_QPS_RTS);
        SAME(attr.qkey, RDMA_UDP_QKEY);
        struct ibv_ah *ah = ibv_create_ah(c.active->pd, &told.event.param.ud.ah_attr);
        CHECK(ah, "create_ah: %s", strerror(errno));
        send_to(c.active, ah, told.event.param.ud.qp_num, told.event.param.ud.qkey, 9);
        received(c.passive, bytes, 9);
        SILENT(c.passive_channel, 0); /* datagrams have no connection */
        FAILS(ibv_destroy_ah(ah), 0);
        WORKS(rdma_dereg_mr(mr));
        drop_connection(&c);
    }
}

static void refused(void)
{
    unsigned char data[256] = {1, 2, 3};
    struct rdma_conn_param param = {.private_data = data, .private_data_len = REQUEST_DATA + 1};
    /* Too long. */
    channel *c = new_channel(), *d = new_channel();
    struct rdma_cm_id *id = new_resolved(c, RDMA_PS_UDP, own_ip(), 4000);
    new_qp(id);
    REFUSES(rdma_connect(id, &param), EINVAL);
    /* Nobody listens: the status is that of the reply. */
    param.private_data_len = 0;
    WORKS(rdma_connect(id, &param));
    TELLS(c, UNREACHABLE, 1);
    drop(id);
    /* Refused. */
    struct rdma_cm_id *listener = new_listener(d, RDMA_PS_UDP, own_ip(), 4);
    id = new_resolved(c, RDMA_PS_UDP, own_ip(), port_of(listener));
    new_qp(id);
    WORKS(rdma_connect(id, &param));
    struct rdma_cm_id *passive = next_told(d, CONNECT_REQUEST).event.id;
    WORKS(rdma_reject(passive, data, 3));
    struct told told = next_told(c, UNREACHABLE);
    SAME(told.event.status, 2);
    SAME(told.event.param.ud.private_data_len, REPLY_DATA);
    CHECK(told.data[2] == 3 && told.data[3] == 0, "other private data");
    drop(passive), drop(id), drop(listener);
    rdma_destroy_event_channel(c), rdma_destroy_event_channel(d);
}

static struct rdma_cm_id *bound_for_datagrams(channel *c, const char *ip)
{
    struct rdma_cm_id *id = new_id(c, RDMA_PS_UDP);
    WORKS(rdma_bind_addr(id, at(ip, 0)));
    new_qp(id);
    return id;
}

static const unsigned char mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

/* Joins, and checks what the program is told of the group. */
static struct told join(channel *c, struct rdma_cm_id *id, const char *group)
{
    struct sockaddr *address = at(group, 0);
    WORKS(rdma_join_multicast(id, address, &bytes));
    struct told told = next_told(c, MULTICAST_JOIN);
    CHECK(told.event.id == id && told.event.param.ud.private_data == &bytes, "another id or context");
    SAME(told.event.status, 0);
    SAME(told.event.param.ud.qp_num, 0xffffff);
    SAME(told.event.param.ud.qkey, RDMA_UDP_QKEY);
    struct ibv_ah_attr *ah = &told.event.param.ud.ah_attr;
    SAME(ah->is_global, 1);
    SAME(ah->port_num, 1);
    union ibv_gid own;
    FAILS(ibv_query_gid(id->verbs, 1, ah->grh.sgid_index, &own), 0);
    if (address->sa_family == AF_INET) {
        CHECK(!memcmp(ah->grh.dgid.raw, mapped, 12) && !memcmp(ah->grh.dgid.raw + 12, &((struct sockaddr_in *)address)->sin_addr, 4), "another group");
        CHECK(!memcmp(own.raw, mapped, 12) && !memcmp(own.raw + 12, &((struct sockaddr_in *)at(own_ip(), 0))->sin_addr, 4), "from another address");
    } else {
        CHECK(!memcmp(ah->grh.dgid.raw, &((struct sockaddr_in6 *)address)->sin6_addr, 16), "another group");
        CHECK(!memcmp(own.raw, &((struct sockaddr_in6 *)at(own_ip6(), 0))->sin6_addr, 16), "from another address");
    }
    return told;
}

static void group_of(const char *ip, const char *group)
{
    channel *c = new_channel();
    struct rdma_cm_id *ids[3];
    static unsigned char buffers[3][256];
    struct ibv_mr *mrs[3];
    struct told told;
    for (int i = 0; i < 3; i++) {
        ids[i] = bound_for_datagrams(c, ip);
        mrs[i] = rdma_reg_msgs(ids[i], buffers[i], 256);
        WORKS(rdma_post_recv(ids[i], NULL, buffers[i], 256, mrs[i]));
    }
    /* The third only sends: it is told of the group, and does not receive. */
    join(c, ids[0], group);
    join(c, ids[1], group);
    struct rdma_cm_join_mc_attr_ex send_only = {.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS,
        .join_flags = RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER, .addr = at(group, 0)};
    WORKS(rdma_join_multicast_ex(ids[2], &send_only, NULL));
    told = next_told(c, MULTICAST_JOIN);
    SAME(told.event.status, 0);
    struct ibv_ah *ah = ibv_create_ah(ids[2]->pd, &told.event.param.ud.ah_attr);
    CHECK(ah, "create_ah: %s", strerror(errno));
    send_to(ids[2], ah, told.event.param.ud.qp_num, told.event.param.ud.qkey, 7);
    received(ids[0], buffers[0], 7);
    received(ids[1], buffers[1], 7);
    /* One leaves: it does not get the next one. */
    WORKS(rdma_leave_multicast(ids[1], at(group, 0)));
    REFUSES(rdma_leave_multicast(ids[1], at(group, 0)), EADDRNOTAVAIL);
    for (int i = 0; i < 2; i++)
        WORKS(rdma_post_recv(ids[i], NULL, buffers[i], 256, mrs[i]));
    send_to(ids[2], ah, told.event.param.ud.qp_num, told.event.param.ud.qkey, 8);
    received(ids[0], buffers[0], 8);
    struct ibv_wc wc;
    for (int i = 1; i < 3; i++)
        SAME(ibv_poll_cq(ids[i]->recv_cq, 1, &wc), 0);
    FAILS(ibv_destroy_ah(ah), 0);
    /* The others leave by their end. */
    for (int i = 0; i < 3; i++) {
        WORKS(rdma_dereg_mr(mrs[i]));
        drop(ids[i]);
    }
    SILENT(c, 0);
    rdma_destroy_event_channel(c);
}

static void multicast(void) { group_of(own_ip(), "239.9.8.7"); }
static void multicast_ipv6(void) { group_of(own_ip6(), "ff0e::db8:9"); }

/* In several groups at once; joined before there is a queue pair; no group's address; left while the event waits. */
static void memberships(void)
{
    channel *c = new_channel();
    struct rdma_cm_id *id = bound_for_datagrams(c, own_ip());
    const char *groups[] = {"239.9.8.1", "239.9.8.2", "239.9.8.3"};
    for (int i = 0; i < 3; i++)
        join(c, id, groups[i]);
    for (int i = 2; i >= 0; i--)
        WORKS(rdma_leave_multicast(id, at(groups[i], 0)));
    WORKS(rdma_join_multicast(id, at(groups[0], 0), NULL));
    CHECK(has_event(c, 30000), "no event");
    WORKS(rdma_leave_multicast(id, at(groups[0], 0)));
    SILENT(c, 0);
    drop(id);
    id = new_id(c, RDMA_PS_UDP);
    WORKS(rdma_bind_addr(id, at(own_ip(), 0)));
    join(c, id, groups[0]);
    drop(id);
    rdma_destroy_event_channel(c);
}

RUN_CM_CASES({"resolve-peer", resolve_peer}, {"refused", refused}, {"multicast", multicast},
    {"multicast-ipv6", multicast_ipv6}, {"memberships", memberships})
