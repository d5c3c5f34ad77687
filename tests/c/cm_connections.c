/* Connections by RDMA CM: private data, refusal, the end of a connection, and what a queue pair gets of it.
 * CM_SILENT: the address of a neighbour without RDMA CM, for connect-to-silence. */
#include "cm.h"

enum { REQ_DATA = 56, REP_DATA = 196, REJ_DATA = 148 };
static unsigned char pattern[256];

static struct rdma_conn_param with_data(int length)
{
    struct rdma_conn_param param = usual();
    for (int i = 0; i < 256; i++)
        pattern[i] = i ^ 0x5a;
    param.private_data = pattern;
    param.private_data_len = length;
    return param;
}

/* The bytes that were sent, then zeros: on the wire the field has one size. */
static void check_data(const struct told *told, int sent, int field)
{
    SAME(told->event.param.conn.private_data_len, field);
    for (int i = 0; i < field; i++)
        CHECK(told->data[i] == (i < sent ? pattern[i] : 0), "byte %d of the private data is %d", i, told->data[i]);
}

static void transfer_case(void)
{
    const char *all[] = {own_ip(), own_ip6()};
    for (int i = 0; i < 2; i++) {
        struct connection c = new_connection(RDMA_PS_TCP, all[i]);
        send_between(c.active, c.passive, 100);
        send_between(c.passive, c.active, 5000);
        SAME(ntohs(rdma_get_dst_port(c.active)), port_of(c.listener));
        SAME(port_of(c.passive), port_of(c.listener));
        SAME(ntohs(rdma_get_dst_port(c.passive)), port_of(c.active));
        SAME(rdma_get_peer_addr(c.passive)->sa_family, i ? AF_INET6 : AF_INET);
        CHECK(c.passive->verbs && c.passive->port_num == 1, "the passive id has no device");
        drop_connection(&c);
    }
}

static void parameters(void)
{
    struct rdma_conn_param param = usual();
    param.responder_resources = 3;
    param.initiator_depth = 5;
    param.flow_control = 1;
    param.retry_count = 6;
    param.rnr_retry_count = 4;
    struct connection c = new_request(RDMA_PS_TCP, own_ip(), &param);
    struct rdma_conn_param *told = &c.request.event.param.conn;
    SAME(c.request.event.status, 0);
    SAME(told->responder_resources, 5); /* what the peer wants to have outstanding is what we must take, and the other way round */
    SAME(told->initiator_depth, 3);
    SAME(told->flow_control, 1);
    SAME(told->retry_count, 6);
    SAME(told->rnr_retry_count, 4);
    SAME(told->srq, 0);
    SAME(told->qp_num, c.active->qp->qp_num);
    param = usual();
    param.responder_resources = 4;
    param.initiator_depth = 2;
    param.rnr_retry_count = 3;
    accept_request(&c, &param);
    told = &c.established.event.param.conn;
    SAME(told->responder_resources, 2);
    SAME(told->initiator_depth, 4);
    SAME(told->rnr_retry_count, 3);
    SAME(told->qp_num, c.passive->qp->qp_num);
    /* What the queue pairs have of it. */
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    FAILS(ibv_query_qp(c.active->qp, &attr, 0x1fffff, &init), 0);
    SAME(attr.qp_state, IBV_QPS_RTS);
    SAME(attr.max_rd_atomic, 4); /* as the peer said */
    SAME(attr.max_dest_rd_atomic, 2);
    SAME(attr.retry_cnt, 6);
    SAME(attr.rnr_retry, 3);
    SAME(attr.timeout, 19);
    SAME(attr.dest_qp_num, c.passive->qp->qp_num);
    FAILS(ibv_query_qp(c.passive->qp, &attr, 0x1fffff, &init), 0);
    SAME(attr.qp_state, IBV_QPS_RTS);
    SAME(attr.max_rd_atomic, 2);
    SAME(attr.max_dest_rd_atomic, 4);
    SAME(attr.retry_cnt, 6);
    SAME(attr.rnr_retry, 4);
    SAME(attr.timeout, 19);
    SAME(attr.dest_qp_num, c.active->qp->qp_num);
    drop_connection(&c);
}

static void private_data(void)
{
    int lengths[] = {0, 1, REQ_DATA};
    for (int i = 0; i < 3; i++) {
        struct rdma_conn_param param = with_data(lengths[i]);
        struct connection c = new_request(RDMA_PS_TCP, own_ip(), &param);
        check_data(&c.request, lengths[i], REQ_DATA);
        param = with_data(lengths[i] == REQ_DATA ? REP_DATA : lengths[i]);
        accept_request(&c, &param);
        check_data(&c.established, param.private_data_len, REP_DATA);
        drop_connection(&c);
    }
    /* One byte too many. The id is as before; an accept that fails refuses the request. */
    channel *c = new_channel(), *d = new_channel();
    struct rdma_cm_id *listener = new_listener(d, RDMA_PS_TCP, own_ip(), 4);
    struct rdma_cm_id *id = new_resolved(c, RDMA_PS_TCP, own_ip(), port_of(listener));
    struct rdma_conn_param param = with_data(REQ_DATA + 1);
    new_qp(id);
    REFUSES(rdma_connect(id, &param), EINVAL);
    param = with_data(REQ_DATA);
    WORKS(rdma_connect(id, &param));
    struct rdma_cm_id *passive = next_told(d, CONNECT_REQUEST).event.id;
    new_qp(passive);
    param = with_data(REP_DATA + 1);
    REFUSES(rdma_accept(passive, &param), EINVAL);
    TELLS(c, REJECTED, 28);
    drop(passive), drop(id);
    id = new_resolved(c, RDMA_PS_TCP, own_ip(), port_of(listener));
    new_qp(id);
    param = usual();
    WORKS(rdma_connect(id, &param));
    passive = next_told(d, CONNECT_REQUEST).event.id;
    REFUSES(rdma_reject(passive, pattern, REJ_DATA + 1), EINVAL);
    WORKS(rdma_reject(passive, pattern, REJ_DATA));
    struct told told = next_told(c, REJECTED);
    SAME(told.event.status, 28);
    check_data(&told, REJ_DATA, REJ_DATA);
    drop(passive), drop(id), drop(listener);
    rdma_destroy_event_channel(c), rdma_destroy_event_channel(d);
}

static void reject(void)
{
    struct connection c = new_request(RDMA_PS_TCP, own_ip(), NULL);
    with_data(0);
    WORKS(rdma_reject(c.passive, pattern, 17));
    struct told told = next_told(c.active_channel, REJECTED);
    SAME(told.event.status, 28);
    check_data(&told, 17, REJ_DATA);
    REFUSES(rdma_reject(c.passive, NULL, 0), EINVAL); /* once only */
    drop(c.passive);
    c.passive = NULL;
    /* An id that was refused can't be used again. */
    struct rdma_conn_param param = usual();
    REFUSES(rdma_connect(c.active, &param), EINVAL);
    drop_connection(&c);
    /* Another reason. */
    c = new_request(RDMA_PS_TCP, own_ip(), NULL);
    WORKS(rdma_reject_ece(c.passive, pattern, 3));
    told = next_told(c.active_channel, REJECTED);
    SAME(told.event.status, 35);
    check_data(&told, 3, REJ_DATA);
    drop_connection(&c);
    /* Who destroys a request refuses it. */
    c = new_request(RDMA_PS_TCP, own_ip(), NULL);
    drop(c.passive);
    c.passive = NULL;
    TELLS(c.active_channel, REJECTED, 28);
    drop_connection(&c);
}

static void no_listener(void)
{
    channel *c = new_channel();
    struct rdma_conn_param param = usual();
    for (int i = 0; i < 2; i++) {
        struct rdma_cm_id *id = new_resolved(c, RDMA_PS_TCP, i ? own_ip6() : own_ip(), 4001);
        new_qp(id);
        WORKS(rdma_connect(id, &param));
        TELLS(c, REJECTED, 8);
        drop(id);
    }
    /* One that is bound but does not listen, and one that has ended. */
    struct rdma_cm_id *bound = new_id(c, RDMA_PS_TCP);
    WORKS(rdma_bind_addr(bound, at(own_ip(), 0)));
    int port = port_of(bound);
    for (int i = 0; i < 2; i++) {
        struct rdma_cm_id *id = new_resolved(c, RDMA_PS_TCP, own_ip(), port);
        new_qp(id);
        WORKS(rdma_connect(id, &param));
        TELLS(c, REJECTED, 8);
        drop(id);
        if (!i) {
            WORKS(rdma_listen(bound, 1));
            drop(bound);
        }
    }
    rdma_destroy_event_channel(c);
}

static int state(struct rdma_cm_id *id)
{
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    FAILS(ibv_query_qp(id->qp, &attr, IBV_QP_STATE, &init), 0);
    return attr.qp_state;
}

static void disconnect(void)
{
    struct connection c = new_connection(RDMA_PS_TCP, own_ip());
    /* Receives that wait are flushed. */
    static char buffer[64];
    struct ibv_mr *mr = rdma_reg_msgs(c.active, buffer, sizeof buffer);
    WORKS(rdma_post_recv(c.active, NULL, buffer, sizeof buffer, mr));
    WORKS(rdma_disconnect(c.active));
    SAME(state(c.active), IBV_QPS_ERR);
    struct ibv_wc wc;
    CHECK(rdma_get_recv_comp(c.active, &wc) == 1 && wc.status == IBV_WC_WR_FLUSH_ERR, "a receive: %s", ibv_wc_status_str(wc.status));
    TELLS(c.passive_channel, DISCONNECTED, 0);
    SAME(state(c.passive), IBV_QPS_RTS); /* the peer's is not touched */
    SILENT(c.active_channel, 300); /* until the peer agrees */
    WORKS(rdma_disconnect(c.passive));
    SAME(state(c.passive), IBV_QPS_ERR);
    TELLS(c.active_channel, DISCONNECTED, 0);
    /* Both wait for what may still be under way. */
    TELLS(c.active_channel, TIMEWAIT_EXIT, 0);
    TELLS(c.passive_channel, TIMEWAIT_EXIT, 0);
    WORKS(rdma_dereg_mr(mr));
    drop_connection(&c);
}

static void disconnect_together(void)
{
    struct connection c = new_connection(RDMA_PS_TCP, own_ip());
    WORKS(rdma_disconnect(c.active));
    WORKS(rdma_disconnect(c.passive));
    TELLS(c.active_channel, DISCONNECTED, 0);
    TELLS(c.passive_channel, DISCONNECTED, 0);
    TELLS(c.active_channel, TIMEWAIT_EXIT, 0);
    TELLS(c.passive_channel, TIMEWAIT_EXIT, 0);
    drop_connection(&c);
}

static void destroy_connected(void)
{
    /* Who destroys an end disconnects it, and answers a peer that has done so. */
    struct connection c = new_connection(RDMA_PS_TCP, own_ip());
    drop(c.active);
    c.active = NULL;
    TELLS(c.passive_channel, DISCONNECTED, 0);
    drop_connection(&c);
    c = new_connection(RDMA_PS_TCP, own_ip());
    WORKS(rdma_disconnect(c.active));
    TELLS(c.passive_channel, DISCONNECTED, 0);
    drop(c.passive);
    c.passive = NULL;
    TELLS(c.active_channel, DISCONNECTED, 0);
    drop_connection(&c);
    /* The listener goes, its connections stay. */
    c = new_connection(RDMA_PS_TCP, own_ip());
    drop(c.listener);
    c.listener = NULL;
    send_between(c.active, c.passive, 100);
    drop_connection(&c);
    /* A request that is under way is given up; the peer has not answered yet, and does not hear of it. */
    c = new_request(RDMA_PS_TCP, own_ip(), NULL);
    drop(c.active);
    c.active = NULL;
    SILENT(c.passive_channel, 100);
    drop_connection(&c);
}

/* The ACK timeout of the passive end: twice the packet life time that the peer gave (14 in all), and the device's delay. */
static int timeout_with_delay(struct rdma_cm_id *id)
{
    struct ibv_device_attr attr;
    FAILS(ibv_query_device(id->verbs, &attr), 0);
    int delay = attr.local_ca_ack_delay, longer = delay > 14 ? delay : 14;
    return longer + (abs(delay - 14) <= 1); /* exponents of 2 */
}

static void qp_attributes(void)
{
    channel *c = new_channel(), *d = new_channel();
    struct rdma_cm_id *listener = new_listener(d, RDMA_PS_TCP, own_ip(), 4);
    struct rdma_cm_id *id = new_id(c, RDMA_PS_TCP);
    uint8_t tos = 0x48, timeout = 14;
    WORKS(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1));
    WORKS(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, 1));
    WORKS(rdma_resolve_addr(id, NULL, at(own_ip(), port_of(listener)), 2000));
    TELLS(c, ADDR_RESOLVED, 0);
    WORKS(rdma_resolve_route(id, 2000));
    TELLS(c, ROUTE_RESOLVED, 0);
    SAME(id->route.path_rec->traffic_class, 0x48);
    SAME(id->route.path_rec->packet_life_time, 13);
    new_qp(id);
    struct rdma_conn_param param = usual();
    WORKS(rdma_connect(id, &param));
    struct rdma_cm_id *passive = next_told(d, CONNECT_REQUEST).event.id;
    new_qp(passive);
    WORKS(rdma_accept(passive, &param));
    TELLS(c, ESTABLISHED, 0);
    TELLS(d, ESTABLISHED, 0);
    struct rdma_cm_id *ends[] = {id, passive};
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr attr;
        struct ibv_qp_init_attr init;
        FAILS(ibv_query_qp(ends[i]->qp, &attr, 0x1fffff, &init), 0);
        SAME(attr.timeout, i ? timeout_with_delay(id) : 14);
        SAME(attr.ah_attr.is_global, 1);
        SAME(attr.ah_attr.grh.traffic_class, 0x48);
        SAME(attr.ah_attr.grh.hop_limit, 64);
        SAME(attr.ah_attr.port_num, 1);
        union ibv_gid own;
        FAILS(ibv_query_gid(ends[i]->verbs, 1, attr.ah_attr.grh.sgid_index, &own), 0);
        CHECK(!memcmp(&own, &attr.ah_attr.grh.dgid, 16), "to another GID than our own");
        SAME(attr.qp_access_flags, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
        SAME(attr.min_rnr_timer, 0);
        SAME(attr.pkey_index, 0);
    }
    send_between(id, passive, 3000);
    drop(id), drop(passive), drop(listener);
    rdma_destroy_event_channel(c), rdma_destroy_event_channel(d);
}

/* A request of `from`, to be accepted by a listener on any address. */
static struct rdma_cm_id *connect_to(channel *c, channel *d, const char *ip, int port, struct rdma_cm_id **passive)
{
    struct rdma_cm_id *id = new_resolved(c, RDMA_PS_TCP, ip, port);
    struct rdma_conn_param param = usual();
    new_qp(id);
    WORKS(rdma_connect(id, &param));
    *passive = next_told(d, CONNECT_REQUEST).event.id;
    new_qp(*passive);
    WORKS(rdma_accept(*passive, &param));
    TELLS(c, ESTABLISHED, 0);
    TELLS(d, ESTABLISHED, 0);
    return id;
}

static void listen_on_any(void)
{
    channel *c = new_channel(), *d = new_channel();
    const char *all[] = {own_ip(), own_ip6()}, *any[] = {"0.0.0.0", "::"};
    for (int i = 0; i < 2; i++) {
        struct rdma_cm_id *listener = new_listener(d, RDMA_PS_TCP, any[i], 4);
        /* One on :: takes both families. */
        for (int j = 0; j <= i; j++) {
            struct rdma_cm_id *passive, *id = connect_to(c, d, all[j], port_of(listener), &passive);
            send_between(id, passive, 100);
            CHECK(passive->verbs == id->verbs, "another device");
            SAME(rdma_get_local_addr(passive)->sa_family, j ? AF_INET6 : AF_INET);
            drop(id), drop(passive);
            while (has_event(d, 0)) { /* the end of the first, which was destroyed first */
                struct rdma_cm_event *event;
                WORKS(rdma_get_cm_event(d, &event));
                WORKS(rdma_ack_cm_event(event));
            }
        }
        drop(listener);
    }
    /* Nobody listens for IPv6 on one of IPv4, or on one that is for IPv6 only the other way round. */
    struct rdma_conn_param param = usual();
    for (int i = 0; i < 2; i++) {
        struct rdma_cm_id *listener = new_id(d, RDMA_PS_TCP);
        int yes = 1;
        if (i)
            WORKS(rdma_set_option(listener, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &yes, sizeof yes));
        WORKS(rdma_bind_addr(listener, at(any[i], 0)));
        WORKS(rdma_listen(listener, 1));
        struct rdma_cm_id *id = new_resolved(c, RDMA_PS_TCP, all[!i], port_of(listener));
        new_qp(id);
        WORKS(rdma_connect(id, &param));
        int status = next_told(c, REJECTED).event.status;
        CHECK(status == 8 || status == 28, "refused with %d", status); /* Linux finds the port, then not the address, and says 28 */
        drop(id), drop(listener);
    }
    rdma_destroy_event_channel(c), rdma_destroy_event_channel(d);
}

static void backlog(void)
{
    channel *c = new_channel(), *d = new_channel();
    struct rdma_cm_id *listener = new_listener(d, RDMA_PS_TCP, own_ip(), 2), *ids[4];
    struct rdma_conn_param param = usual();
    for (int i = 0; i < 4; i++) {
        ids[i] = new_resolved(c, RDMA_PS_TCP, own_ip(), port_of(listener));
        new_qp(ids[i]);
        WORKS(rdma_connect(ids[i], &param));
    }
    /* One that is refused, as nobody listens there: the four before it have arrived then. */
    struct rdma_cm_id *deaf = new_id(d, RDMA_PS_TCP);
    WORKS(rdma_bind_addr(deaf, at(own_ip(), 0)));
    struct rdma_cm_id *refused = new_resolved(c, RDMA_PS_TCP, own_ip(), port_of(deaf));
    new_qp(refused);
    WORKS(rdma_connect(refused, &param));
    next_told(c, REJECTED);
    drop(refused), drop(deaf);
    /* Two wait; those beyond are not answered, and come again after the response timeout of 4.3 s. */
    struct rdma_cm_id *passive[4];
    for (int i = 0; i < 4; i++) {
        passive[i] = next_told(d, CONNECT_REQUEST).event.id;
        if (i == 1)
            SILENT(d, 1000);
    }
    for (int i = 0; i < 4; i++) {
        new_qp(passive[i]);
        WORKS(rdma_accept(passive[i], &param));
        TELLS(c, ESTABLISHED, 0);
        TELLS(d, ESTABLISHED, 0);
    }
    for (int i = 0; i < 4; i++)
        drop(ids[i]), drop(passive[i]);
    drop(listener);
    rdma_destroy_event_channel(c), rdma_destroy_event_channel(d);
}

/* The listener is destroyed while requests wait in its channel, or have been got: those that were not are refused. */
static void listener_goes(void)
{
    channel *c = new_channel(), *d = new_channel();
    struct rdma_cm_id *listener = new_listener(d, RDMA_PS_TCP, own_ip(), 4), *ids[3];
    struct rdma_conn_param param = usual();
    for (int i = 0; i < 3; i++) {
        ids[i] = new_resolved(c, RDMA_PS_TCP, own_ip(), port_of(listener));
        new_qp(ids[i]);
        WORKS(rdma_connect(ids[i], &param));
        if (i == 0)
            CHECK(has_event(d, 30000), "no request");
    }
    struct rdma_cm_id *passive = next_told(d, CONNECT_REQUEST).event.id;
    drop(listener);
    for (int i = 0; i < 2; i++) { /* 28 if it was there already, 8 if it came later */
        int status = next_told(c, REJECTED).event.status;
        CHECK(status == 28 || status == 8, "refused with %d", status);
    }
    SILENT(d, 0);
    new_qp(passive);
    WORKS(rdma_accept(passive, &param));
    TELLS(c, ESTABLISHED, 0);
    TELLS(d, ESTABLISHED, 0);
    send_between(ids[0], passive, 10);
    for (int i = 0; i < 3; i++)
        drop(ids[i]);
    drop(passive);
    rdma_destroy_event_channel(c), rdma_destroy_event_channel(d);
}

/* Connected to a neighbour that does not speak RDMA CM: nothing answers. */
static void connect_to_silence(void)
{
    channel *c = new_channel();
    struct rdma_cm_id *id = new_resolved(c, RDMA_PS_TCP, getenv("CM_SILENT"), 4000);
    struct rdma_conn_param param = usual();
    new_qp(id);
    WORKS(rdma_connect(id, &param));
    SILENT(c, 1000);
    drop(id); /* what is under way is given up at once */
    SILENT(c, 0);
    rdma_destroy_event_channel(c);
}

/* The same to its end: 16 requests, 4.3 s each. */
static void silence_ends(void)
{
    channel *c = new_channel();
    struct rdma_cm_id *id = new_resolved(c, RDMA_PS_TCP, getenv("CM_SILENT"), 4000);
    struct rdma_conn_param param = usual();
    new_qp(id);
    WORKS(rdma_connect(id, &param));
    SILENT(c, 60000);
    TELLS(c, UNREACHABLE, -ETIMEDOUT);
    drop(id);
    rdma_destroy_event_channel(c);
}

RUN_CM_CASES({"transfer", transfer_case}, {"parameters", parameters}, {"private-data", private_data}, {"reject", reject},
    {"no-listener", no_listener}, {"disconnect", disconnect}, {"disconnect-together", disconnect_together},
    {"destroy-connected", destroy_connected}, {"qp-attributes", qp_attributes}, {"listen-on-any", listen_on_any},
    {"backlog", backlog}, {"listener-goes", listener_goes}, {"connect-to-silence", connect_to_silence},
    {"silence-ends", silence_ends})
