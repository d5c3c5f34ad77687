/* The cases. Expected values are those of Linux's own rdma_cm on both sides. */
#include "connections.h"
#include <arpa/inet.h>
#include <errno.h>
#include <unistd.h>

struct rdma_conn_param parameters(int private_length)
{
    return (struct rdma_conn_param){
        .private_data = private_bytes(),
        .private_data_len = (uint8_t)private_length,
        .responder_resources = 1,
        .initiator_depth = 1,
        .retry_count = 7,
        .rnr_retry_count = 7,
    };
}

/* Connects with private data, and is to be accepted with some. */
void connect_with(struct session *s, int sent, int answered)
{
    struct rdma_conn_param param = parameters(sent);
    resolve(s);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_ESTABLISHED, 0);
    expect_private(s, REP_ROOM, answered);
}

void accept_with(struct session *s, int sent, int received)
{
    struct rdma_conn_param param = parameters(sent);
    listen_here(s, 8);
    take_request(s);
    expect_private(s, REQ_ROOM, received);
    make_qp(s);
    ZERO(rdma_accept(s->id, &param));
}

/* Data does not wait for the word that the connection is established. */
void use_and_part(struct session *s)
{
    exchange(s);
    if (!s->active)
        expect(s, RDMA_CM_EVENT_ESTABLISHED, 0);
    sync_peer(s);
    part(s);
}

void request_active(struct session *s)
{
    connect_with(s, current->number, 0);
    use_and_part(s);
}

void request_passive(struct session *s)
{
    accept_with(s, 0, current->number);
    use_and_part(s);
}

static void reply_active(struct session *s)
{
    connect_with(s, 0, current->number);
    use_and_part(s);
}

static void reply_passive(struct session *s)
{
    accept_with(s, current->number, 0);
    use_and_part(s);
}

void reject_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    resolve(s);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_REJECTED, CONSUMER);
    expect_private(s, REJ_ROOM, current->number);
}

static void reject_passive(struct session *s)
{
    listen_here(s, 8);
    take_request(s);
    ZERO(rdma_reject(s->id, private_bytes(), (uint8_t)current->number));
}

/* A program that has its queue pair to itself sees the reply, and may refuse it. */
static void reject_reply_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    resolve(s);
    make_qp_apart(s);
    param.qp_num = s->apart->qp_num;
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    ZERO(rdma_reject(s->id, private_bytes(), (uint8_t)current->number));
}

static void reject_reply_passive(struct session *s)
{
    accept_with(s, 0, 0);
    expect(s, RDMA_CM_EVENT_REJECTED, CONSUMER);
    expect_private(s, REJ_ROOM, current->number);
}

/* More private data than a message has room for is refused here, and all goes on. */
static void too_long_active(struct session *s)
{
    struct rdma_conn_param param = parameters(REQ_ROOM + 1);
    resolve(s);
    make_qp(s);
    MUST(rdma_connect(s->id, &param) && errno == EINVAL, "57 bytes of private data: %s", strerror(errno));
    param.private_data_len = 0;
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_REJECTED, CONSUMER);
}

static void too_long_passive(struct session *s)
{
    listen_here(s, 8);
    take_request(s);
    MUST(rdma_reject(s->id, private_bytes(), REJ_ROOM + 1) && errno == EINVAL, "149 bytes of private data: %s", strerror(errno));
    ZERO(rdma_reject(s->id, NULL, 0));
}

/* What one side says of itself, as the other is told: that is what the kernel makes of it. */
static void expect_conn(struct session *s, int responder_resources, int initiator_depth, int flow_control, int retry, int rnr_retry, uint32_t qpn)
{
    struct rdma_conn_param *c = &s->event.conn;
    MUST(c->responder_resources == responder_resources && c->initiator_depth == initiator_depth && c->flow_control == flow_control &&
             c->retry_count == retry && c->rnr_retry_count == rnr_retry && c->qp_num == qpn && c->srq == 0,
         "responder resources %d, depth %d, flow control %d, retries %d, RNR retries %d, QPN 0x%x, SRQ %d; "
         "not %d, %d, %d, %d, %d, 0x%x, 0",
         c->responder_resources, c->initiator_depth, c->flow_control, c->retry_count, c->rnr_retry_count, c->qp_num, c->srq,
         responder_resources, initiator_depth, flow_control, retry, rnr_retry, qpn);
}

static void parameters_active(struct session *s)
{
    struct rdma_conn_param param = {.responder_resources = 3, .initiator_depth = 5, .flow_control = 1, .retry_count = 4, .rnr_retry_count = 6};
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    resolve(s);
    make_qp(s);
    tell(s, s->id->qp->qp_num);
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_ESTABLISHED, 0);
    uint32_t qpn = hear(s);
    expect_conn(s, 1, 2, 1, 0, 3, qpn);
    MUST(!ibv_query_qp(s->id->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT, &init), "the queue pair can't be queried");
    MUST(attr.qp_state == IBV_QPS_RTS && attr.dest_qp_num == qpn && attr.retry_cnt == 4 && attr.rnr_retry == 3 && attr.timeout == 19,
         "state %d, peer 0x%x, retries %d, RNR retries %d, timeout %d", attr.qp_state, attr.dest_qp_num, attr.retry_cnt, attr.rnr_retry, attr.timeout);
    use_and_part(s);
}

static void parameters_passive(struct session *s)
{
    struct rdma_conn_param param = {.responder_resources = 2, .initiator_depth = 1, .flow_control = 1, .rnr_retry_count = 3};
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    listen_here(s, 8);
    uint32_t qpn = hear(s);
    take_request(s);
    expect_conn(s, 5, 3, 1, 4, 6, qpn); /* librdmacm says what may be accepted: the peer's are the other way round */
    make_qp(s);
    tell(s, s->id->qp->qp_num);
    ZERO(rdma_accept(s->id, &param));
    MUST(!ibv_query_qp(s->id->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT, &init), "the queue pair can't be queried");
    MUST(attr.qp_state == IBV_QPS_RTS && attr.dest_qp_num == qpn && attr.retry_cnt == 4 && attr.rnr_retry == 6 && attr.timeout == 19,
         "state %d, peer 0x%x, retries %d, RNR retries %d, timeout %d", attr.qp_state, attr.dest_qp_num, attr.retry_cnt, attr.rnr_retry, attr.timeout);
    use_and_part(s);
}

/* The addresses and ports that the ids have. */
static void addresses(struct session *s)
{
    struct sockaddr *local = rdma_get_local_addr(s->id), *peer = rdma_get_peer_addr(s->id);
    struct sockaddr_storage *mine = s->active ? &s->from : &s->to, *theirs = s->active ? &s->to : &s->from;
    if (mine->ss_family == AF_INET) {
        struct sockaddr_in *a = (void *)local, *b = (void *)peer;
        MUST(a->sin_family == AF_INET && a->sin_addr.s_addr == ((struct sockaddr_in *)mine)->sin_addr.s_addr, "the local address is wrong");
        MUST(b->sin_family == AF_INET && b->sin_addr.s_addr == ((struct sockaddr_in *)theirs)->sin_addr.s_addr, "the peer's address is wrong");
    } else {
        struct sockaddr_in6 *a = (void *)local, *b = (void *)peer, *c = (void *)mine, *d = (void *)theirs;
        /* The kernel's passive side leaves out the scope. */
        MUST(a->sin6_family == AF_INET6 && !memcmp(&a->sin6_addr, &c->sin6_addr, 16) &&
                 (a->sin6_scope_id == c->sin6_scope_id || (!s->active && !a->sin6_scope_id)),
             "the local address is wrong: scope %u, not %u", a->sin6_scope_id, c->sin6_scope_id);
        MUST(b->sin6_family == AF_INET6 && !memcmp(&b->sin6_addr, &d->sin6_addr, 16) &&
                 (b->sin6_scope_id == d->sin6_scope_id || (!s->active && !b->sin6_scope_id)),
             "the peer's address is wrong: scope %u, not %u", b->sin6_scope_id, d->sin6_scope_id);
    }
    tell(s, ntohs(rdma_get_src_port(s->id)));
    uint32_t port = hear(s);
    MUST(ntohs(rdma_get_dst_port(s->id)) == port, "the peer's port is %d, not %u", ntohs(rdma_get_dst_port(s->id)), port);
}

static void addresses_active(struct session *s)
{
    connect_with(s, 0, 0);
    addresses(s);
    use_and_part(s);
}

static void addresses_passive(struct session *s)
{
    accept_with(s, 0, 0);
    addresses(s);
    use_and_part(s);
}

/* A queue pair of the program's own, brought up by the attributes that RDMA CM gives; the ECE words are passed on. */
static void own_qp_active(struct session *s)
{
    struct rdma_conn_param param = parameters(REQ_ROOM);
    struct ibv_ece ece = {.vendor_id = (uint32_t)current->number, .options = (uint32_t)current->number * 5};
    resolve(s);
    make_qp_apart(s);
    param.qp_num = s->apart->qp_num;
    if (current->number)
        ZERO(rdma_set_local_ece(s->id, &ece));
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    expect_private(s, REP_ROOM, REP_ROOM);
    ZERO(rdma_get_remote_ece(s->id, &ece));
    MUST(ece.vendor_id == (uint32_t)current->number && ece.options == (uint32_t)current->number * 3, "ECE is 0x%x, 0x%x", ece.vendor_id, ece.options);
    bring_up(s, IBV_QPS_RTR);
    bring_up(s, IBV_QPS_RTS);
    ZERO(rdma_establish(s->id));
    use_and_part(s);
}

static void own_qp_passive(struct session *s)
{
    struct rdma_conn_param param = parameters(REP_ROOM);
    struct ibv_ece ece = {0};
    listen_here(s, 8);
    take_request(s);
    expect_private(s, REQ_ROOM, REQ_ROOM);
    ZERO(rdma_get_remote_ece(s->id, &ece));
    MUST(ece.vendor_id == (uint32_t)current->number && ece.options == (uint32_t)current->number * 5, "ECE is 0x%x, 0x%x", ece.vendor_id, ece.options);
    ece.options = (uint32_t)current->number * 3;
    if (current->number)
        ZERO(rdma_set_local_ece(s->id, &ece));
    make_qp_apart(s);
    param.qp_num = s->apart->qp_num;
    bring_up(s, IBV_QPS_RTR);
    bring_up(s, IBV_QPS_RTS);
    ZERO(rdma_accept(s->id, &param));
    use_and_part(s);
}

/* Nobody listens at that port any more. */
static void closed_port_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    resolve(s);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_REJECTED, NO_LISTENER);
    expect_private(s, REJ_ROOM, 0);
    sync_peer(s);
}

static void closed_port_passive(struct session *s)
{
    open_channel(s);
    ZERO(rdma_create_id(s->channel, &s->id, NULL, s->space));
    ZERO(rdma_bind_addr(s->id, (struct sockaddr *)&s->to));
    tell(s, ntohs(rdma_get_src_port(s->id)));
    sync_peer(s);
}

/* The passive side throws away the request, or its listener with a request that it has not looked at. */
static void thrown_away_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    resolve(s);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    if (current->number)
        sync_peer(s);
    expect(s, RDMA_CM_EVENT_REJECTED, CONSUMER);
    expect_private(s, REJ_ROOM, 0);
}

static void thrown_away_passive(struct session *s)
{
    listen_here(s, 8);
    if (current->number) {
        sync_peer(s);
        usleep(200000); /* it may be that it comes later: then nobody listens */
        return;
    }
    take_request(s);
}

/* The active side gives up before it has an answer. The kernel tells that only who answers. */
static void withdrawn_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    resolve(s);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    sync_peer(s);
}

static void withdrawn_passive(struct session *s)
{
    listen_here(s, 8);
    take_request(s);
    sync_peer(s);
    expect_none(s, 300);
    MUST(rdma_reject(s->id, NULL, 0) && errno == EINVAL, "a request that was withdrawn is rejected: %s", strerror(errno));
}

static void disconnect_active(struct session *s)
{
    connect_with(s, 0, 0);
    exchange(s);
    sync_peer(s);
    if (current->number != 1)
        ZERO(rdma_disconnect(s->id));
    expect(s, RDMA_CM_EVENT_DISCONNECTED, 0);
    if (current->number == 1)
        ZERO(rdma_disconnect(s->id));
}

static void disconnect_passive(struct session *s)
{
    accept_with(s, 0, 0);
    exchange(s);
    expect(s, RDMA_CM_EVENT_ESTABLISHED, 0);
    sync_peer(s);
    if (current->number != 0)
        ZERO(rdma_disconnect(s->id));
    expect(s, RDMA_CM_EVENT_DISCONNECTED, 0);
    if (current->number == 0)
        ZERO(rdma_disconnect(s->id));
}

/* The id lives on, and the time that the queue pair number is kept ends. */
static void timewait(struct session *s)
{
    part(s);
    double since = now();
    expect(s, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
    MUST(now() - since < 5, "the time wait lasts %.1f s", now() - since);
}

static void timewait_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    uint8_t timeout = 14;
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    uint16_t port = (uint16_t)hear(s);
    open_channel(s);
    ((struct sockaddr_in *)&s->to)->sin_port = htons(port);
    ZERO(rdma_create_id(s->channel, &s->id, NULL, s->space));
    ZERO(rdma_set_option(s->id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof timeout));
    ZERO(rdma_resolve_addr(s->id, (struct sockaddr *)&s->from, (struct sockaddr *)&s->to, 5000));
    expect(s, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    ZERO(rdma_resolve_route(s->id, 5000));
    expect(s, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_ESTABLISHED, 0);
    MUST(!ibv_query_qp(s->id->qp, &attr, IBV_QP_TIMEOUT, &init) && attr.timeout == 14, "the timeout is %d", attr.timeout);
    exchange(s);
    timewait(s);
}

/* What the kernel makes of a packet life time and of the device's own delay, both as exponents. */
static int ack_timeout(struct session *s, int life_time)
{
    struct ibv_device_attr device;
    MUST(!ibv_query_device(s->id->verbs, &device), "the device can't be queried");
    int timeout = life_time + 1, delay = device.local_ca_ack_delay;
    return timeout >= delay ? timeout + (delay >= timeout - 1) : delay + (timeout >= delay - 1);
}

static void timewait_passive(struct session *s)
{
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    accept_with(s, 0, 0);
    exchange(s);
    expect(s, RDMA_CM_EVENT_ESTABLISHED, 0);
    int timeout = ack_timeout(s, 13);
    MUST(!ibv_query_qp(s->id->qp, &attr, IBV_QP_TIMEOUT, &init) && attr.timeout == timeout, "the timeout is %d, not %d", attr.timeout, timeout);
    timewait(s);
}

/* Datagrams: who has the service is asked for. */
static void datagrams_active(struct session *s, int sent, int answered)
{
    struct rdma_conn_param param = parameters(sent);
    s->space = RDMA_PS_UDP;
    resolve(s);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_ESTABLISHED, 0);
    expect_private(s, SIDR_REP_ROOM, answered);
    MUST(s->event.ud.qkey == RDMA_UDP_QKEY, "the Q_Key is 0x%x", s->event.ud.qkey);
    MUST(s->event.ud.qp_num == hear(s), "the QPN is 0x%x", s->event.ud.qp_num);
    exchange(s);
}

void datagrams_accept(struct session *s, int sent, int received)
{
    struct rdma_conn_param param = parameters(sent);
    s->space = RDMA_PS_UDP;
    listen_here(s, 8);
    take_request(s);
    expect_private(s, SIDR_REQ_ROOM, received);
    make_qp(s);
    param.qp_num = s->id->qp->qp_num;
    tell(s, s->id->qp->qp_num);
    ZERO(rdma_accept(s->id, &param));
}

static void datagrams_passive(struct session *s, int sent, int received)
{
    datagrams_accept(s, sent, received);
    exchange(s);
}

void sidr_request_active(struct session *s) { datagrams_active(s, current->number, 0); }
static void sidr_request_passive(struct session *s) { datagrams_passive(s, 0, current->number); }
static void sidr_reply_active(struct session *s) { datagrams_active(s, 0, current->number); }
static void sidr_reply_passive(struct session *s) { datagrams_passive(s, current->number, 0); }

static void sidr_reject_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    s->space = RDMA_PS_UDP;
    resolve(s);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_UNREACHABLE, 2);
    expect_private(s, SIDR_REP_ROOM, current->number);
}

static void sidr_reject_passive(struct session *s)
{
    s->space = RDMA_PS_UDP;
    listen_here(s, 8);
    take_request(s);
    ZERO(rdma_reject(s->id, private_bytes(), (uint8_t)current->number));
}

static void sidr_closed_port_active(struct session *s)
{
    struct rdma_conn_param param = parameters(0);
    s->space = RDMA_PS_UDP;
    resolve(s);
    make_qp(s);
    ZERO(rdma_connect(s->id, &param));
    expect(s, RDMA_CM_EVENT_UNREACHABLE, 1);
    sync_peer(s);
}

static void sidr_closed_port_passive(struct session *s)
{
    s->space = RDMA_PS_UDP;
    closed_port_passive(s);
}

/* Addresses that nobody has, and that no route leads to: 1 second is enough. */
static void unresolved_active(struct session *s)
{
    struct sockaddr_storage nobody = s->to;
    bool four = nobody.ss_family == AF_INET;
    if (current->number)
        inet_pton(nobody.ss_family, four ? "203.0.113.7" : "2001:db8::7", four ? (void *)&((struct sockaddr_in *)&nobody)->sin_addr : (void *)&((struct sockaddr_in6 *)&nobody)->sin6_addr);
    else if (four)
        ((uint8_t *)&((struct sockaddr_in *)&nobody)->sin_addr)[3] = 77;
    else
        ((struct sockaddr_in6 *)&nobody)->sin6_addr.s6_addr[15] ^= 0x77;
    open_channel(s);
    ZERO(rdma_create_id(s->channel, &s->id, NULL, s->space));
    /* That there is no route, the kernel says at once for IPv6, and later for IPv4. */
    int rc = rdma_resolve_addr(s->id, NULL, (struct sockaddr *)&nobody, 1000);
    MUST(!rc || (current->number && errno == ENETUNREACH), "rdma_resolve_addr: %s", strerror(errno));
    if (!rc)
        expect(s, RDMA_CM_EVENT_ADDR_ERROR, current->number ? -ENETUNREACH : -ETIMEDOUT);
    /* The id may be used again. */
    ZERO(rdma_destroy_id(s->id));
    resolve(s);
}

static void unresolved_passive(struct session *s)
{
    listen_here(s, 8);
}

const struct test connection_tests[] = {
    {"request/0", request_active, request_passive, 0},
    {"request/1", request_active, request_passive, 1},
    {"request/55", request_active, request_passive, 55},
    {"request/56", request_active, request_passive, 56},
    {"reply/1", reply_active, reply_passive, 1},
    {"reply/195", reply_active, reply_passive, 195},
    {"reply/196", reply_active, reply_passive, 196},
    {"reject/0", reject_active, reject_passive, 0},
    {"reject/1", reject_active, reject_passive, 1},
    {"reject/148", reject_active, reject_passive, 148},
    {"reject-reply/0", reject_reply_active, reject_reply_passive, 0},
    {"reject-reply/148", reject_reply_active, reject_reply_passive, 148},
    {"too-long", too_long_active, too_long_passive, 0},
    {"parameters", parameters_active, parameters_passive, 0},
    {"addresses", addresses_active, addresses_passive, 0},
    {"own-qp/no-ece", own_qp_active, own_qp_passive, 0},
    {"own-qp/ece", own_qp_active, own_qp_passive, 0x2c9},
    {"closed-port", closed_port_active, closed_port_passive, 0},
    {"thrown-away/request", thrown_away_active, thrown_away_passive, 0},
    {"thrown-away/listener", thrown_away_active, thrown_away_passive, 1},
    {"withdrawn", withdrawn_active, withdrawn_passive, 0},
    {"disconnect/active", disconnect_active, disconnect_passive, 0},
    {"disconnect/passive", disconnect_active, disconnect_passive, 1},
    {"disconnect/both", disconnect_active, disconnect_passive, 2},
    {"unresolved/neighbour", unresolved_active, unresolved_passive, 0},
    {"unresolved/route", unresolved_active, unresolved_passive, 1},
    {"timewait", timewait_active, timewait_passive, 0},
    {"sidr/request/0", sidr_request_active, sidr_request_passive, 0},
    {"sidr/request/180", sidr_request_active, sidr_request_passive, 180},
    {"sidr/reply/1", sidr_reply_active, sidr_reply_passive, 1},
    {"sidr/reply/136", sidr_reply_active, sidr_reply_passive, 136},
    {"sidr/reject/0", sidr_reject_active, sidr_reject_passive, 0},
    {"sidr/reject/136", sidr_reject_active, sidr_reject_passive, 136},
    {"sidr/closed-port", sidr_closed_port_active, sidr_closed_port_passive, 0},
    {0},
};
