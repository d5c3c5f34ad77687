/* The steps that cases are made of: events, ids, queue pairs, data. */
#include "connections.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

/* What both sides send as private data: no two places near each other are alike, and none is zero. */
const uint8_t *private_bytes(void)
{
    static uint8_t bytes[256];
    for (int i = 0; i < 256; i++)
        bytes[i] = (uint8_t)(1 + i * 7 % 255);
    return bytes;
}

/* Awaits the next event of any id, and keeps it. */
static void next_event(struct session *s, const char *wanted)
{
    struct pollfd fds[] = {{s->channel->fd, POLLIN, 0}};
    double end = now() + s->patience;
    while (poll(fds, 1, 100) != 1) {
        MUST(!peer_gave_up(s), "the other side ends the case; %s is awaited here", wanted);
        MUST(now() < end, "no event in %d s; %s is awaited", s->patience, wanted);
    }
    struct rdma_cm_event *event;
    ZERO(rdma_get_cm_event(s->channel, &event));
    s->event = (struct event){.type = event->event, .status = event->status, .id = event->id, .listener = event->listen_id};
    bool datagrams = s->space == RDMA_PS_UDP;
    const void *data = datagrams ? event->param.ud.private_data : event->param.conn.private_data;
    s->event.length = datagrams ? event->param.ud.private_data_len : event->param.conn.private_data_len;
    if (datagrams)
        s->event.ud = event->param.ud;
    else
        s->event.conn = event->param.conn;
    if (data)
        memcpy(s->event.private_data, data, (size_t)s->event.length);
    ZERO(rdma_ack_cm_event(event));
}

/* Awaits an event, which must be this one. */
void expect(struct session *s, enum rdma_cm_event_type type, int status)
{
    next_event(s, rdma_event_str(type));
    MUST(s->event.type == type && s->event.status == status, "%s with status %d, not %s with %d", rdma_event_str(s->event.type),
         s->event.status, rdma_event_str(type), status);
}

void expect_either(struct session *s, enum rdma_cm_event_type type, int status, enum rdma_cm_event_type other, int other_status)
{
    next_event(s, rdma_event_str(type));
    MUST((s->event.type == type && s->event.status == status) || (s->event.type == other && s->event.status == other_status),
         "%s with status %d, neither %s with %d nor %s with %d", rdma_event_str(s->event.type), s->event.status,
         rdma_event_str(type), status, rdma_event_str(other), other_status);
}

/* Is there an event already, or soon? */
bool event_waits(struct session *s)
{
    struct pollfd fds[] = {{s->channel->fd, POLLIN, 0}};
    MUST(!peer_gave_up(s), "the other side ends the case");
    return poll(fds, 1, 10) == 1;
}

/* Nothing happens for so long. */
void expect_none(struct session *s, int milliseconds)
{
    struct pollfd fds[] = {{s->channel->fd, POLLIN, 0}};
    if (poll(fds, 1, milliseconds) == 1) {
        next_event(s, "nothing");
        fail(s, "%s with status %d, where none is due", rdma_event_str(s->event.type), s->event.status);
    }
}

/* The last event has the private data that the peer sent, in as much room as that message has. */
void expect_private(struct session *s, int room, int sent)
{
    MUST(s->event.length == room, "%d bytes of private data, not %d", s->event.length, room);
    for (int i = 0; i < room; i++) {
        uint8_t wanted = i < sent ? private_bytes()[i] : 0;
        MUST(s->event.private_data[i] == wanted, "byte %d of the private data is %d, not %d", i, s->event.private_data[i], wanted);
    }
}

void open_channel(struct session *s)
{
    s->channel = rdma_create_event_channel();
    MUST(s->channel, "no event channel: %s", strerror(errno));
}

/* Listens at a port that RDMA CM chooses, and tells the peer. */
void listen_here(struct session *s, int backlog)
{
    open_channel(s);
    ZERO(rdma_create_id(s->channel, &s->listener, NULL, s->space));
    ZERO(rdma_bind_addr(s->listener, (struct sockaddr *)&s->to));
    ZERO(rdma_listen(s->listener, backlog));
    MUST(rdma_get_src_port(s->listener), "the listener has no port");
    tell(s, ntohs(rdma_get_src_port(s->listener)));
}

void take_request(struct session *s)
{
    expect(s, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    s->id = s->event.id;
    MUST(s->event.listener == s->listener, "the request is for another listener");
    MUST(s->id && s->id != s->listener && s->id->verbs, "the request has no id of its own");
}

void resolve_to(struct session *s, uint16_t port)
{
    if (!s->channel)
        open_channel(s);
    ((struct sockaddr_in *)&s->to)->sin_port = htons(port); /* at the same place in sockaddr_in6 */
    ZERO(rdma_create_id(s->channel, &s->id, NULL, s->space));
    ZERO(rdma_resolve_addr(s->id, (struct sockaddr *)&s->from, (struct sockaddr *)&s->to, 5000));
    expect(s, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    ZERO(rdma_resolve_route(s->id, 5000));
    expect(s, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
}

/* An id that may connect to where the peer listens. */
void resolve(struct session *s)
{
    resolve_to(s, (uint16_t)hear(s));
}

static struct ibv_qp *qp_of(struct session *s)
{
    return s->apart ? s->apart : s->id->qp;
}

static void make_queues(struct session *s, struct ibv_qp_init_attr *init)
{
    s->pd = ibv_alloc_pd(s->id->verbs);
    MUST(s->pd, "no protection domain: %s", strerror(errno));
    s->cq = ibv_create_cq(s->id->verbs, 16, NULL, NULL, 0);
    MUST(s->cq, "no completion queue: %s", strerror(errno));
    s->bytes = calloc(2, MESSAGE);
    s->mr = ibv_reg_mr(s->pd, s->bytes, 2 * MESSAGE, IBV_ACCESS_LOCAL_WRITE);
    MUST(s->mr, "no memory region: %s", strerror(errno));
    *init = (struct ibv_qp_init_attr){
        .send_cq = s->cq,
        .recv_cq = s->cq,
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = s->space == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC,
    };
}

static void post_receive(struct session *s)
{
    struct ibv_sge sge = {(uintptr_t)s->bytes + MESSAGE, MESSAGE, s->mr->lkey};
    struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
    MUST(!ibv_post_recv(qp_of(s), &wr, &bad), "no receive");
}

void make_qp(struct session *s)
{
    struct ibv_qp_init_attr init;
    make_queues(s, &init);
    ZERO(rdma_create_qp(s->id, s->pd, &init));
    post_receive(s);
}

/* One that librdmacm does not know of: the program brings it up. */
void make_qp_apart(struct session *s)
{
    struct ibv_qp_init_attr init;
    make_queues(s, &init);
    s->apart = ibv_create_qp(s->pd, &init);
    MUST(s->apart, "no queue pair: %s", strerror(errno));
    bring_up(s, IBV_QPS_INIT);
    post_receive(s);
}

void bring_up(struct session *s, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = {.qp_state = state};
    int mask;
    ZERO(rdma_init_qp_attr(s->id, &attr, &mask));
    MUST(attr.qp_state == state, "attributes for state %d, not %d", attr.qp_state, state);
    int rc = ibv_modify_qp(s->apart, &attr, mask);
    MUST(!rc, "to state %d: %s", state, strerror(rc));
}

/* Has data come? */
bool arrived(struct session *s)
{
    s->found = s->found || ibv_poll_cq(s->cq, 1, &s->wc) == 1;
    return s->found;
}

static void completion(struct session *s, enum ibv_wc_opcode opcode, uint32_t length)
{
    struct ibv_wc wc = s->wc;
    double end = now() + s->patience;
    int n = s->found;
    s->found = false;
    while (!n && !(n = ibv_poll_cq(s->cq, 1, &wc))) {
        MUST(!peer_gave_up(s), "the other side ends the case; a completion is awaited here");
        MUST(now() < end, "no completion in %d s", s->patience);
        usleep(1000);
    }
    MUST(n == 1 && wc.status == IBV_WC_SUCCESS && wc.opcode == opcode, "completion: %d, %s, opcode %d not %d", n,
         ibv_wc_status_str(wc.status), wc.opcode, opcode);
    MUST(opcode == IBV_WC_SEND || wc.byte_len == length, "%u bytes, not %u", wc.byte_len, length);
}

/* A message goes to the passive side, and one comes back. Datagrams go there only: the passive side knows no address. */
void exchange(struct session *s)
{
    bool datagram = s->space == RDMA_PS_UDP;
    uint32_t length = datagram ? MESSAGE / 4 : MESSAGE, header = datagram ? GRH : 0;
    for (int turn = 0; turn < (datagram ? 1 : 2); turn++) {
        if (s->active == (turn == 0)) {
            struct ibv_sge sge = {(uintptr_t)s->bytes, length, s->mr->lkey};
            struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
            for (uint32_t i = 0; i < length; i++)
                s->bytes[i] = (uint8_t)(i * 31 + i / 256 + (uint32_t)turn);
            if (datagram) {
                wr.wr.ud.ah = ibv_create_ah(s->pd, &s->event.ud.ah_attr);
                MUST(wr.wr.ud.ah, "no address handle: %s", strerror(errno));
                wr.wr.ud.remote_qpn = s->event.ud.qp_num;
                wr.wr.ud.remote_qkey = s->event.ud.qkey;
            }
            MUST(!ibv_post_send(qp_of(s), &wr, &bad), "no send");
            completion(s, IBV_WC_SEND, 0);
            if (datagram)
                ibv_destroy_ah(wr.wr.ud.ah);
        } else {
            completion(s, IBV_WC_RECV, length + header);
            post_receive(s);
            for (uint32_t i = 0; i < length; i++)
                MUST(s->bytes[MESSAGE + header + i] == (uint8_t)(i * 31 + i / 256 + (uint32_t)turn), "byte %u is wrong", i);
        }
    }
}

/* The active side disconnects, and both are told. */
void part(struct session *s)
{
    if (s->active)
        ZERO(rdma_disconnect(s->id));
    expect(s, RDMA_CM_EVENT_DISCONNECTED, 0);
    if (!s->active)
        ZERO(rdma_disconnect(s->id)); /* the answer */
}

void close_all(struct session *s)
{
    if (s->id && s->id->qp)
        rdma_destroy_qp(s->id);
    if (s->apart)
        MUST(!ibv_destroy_qp(s->apart), "the queue pair can't be destroyed");
    if (s->mr)
        MUST(!ibv_dereg_mr(s->mr), "the memory region can't be removed");
    if (s->cq)
        MUST(!ibv_destroy_cq(s->cq), "the completion queue can't be destroyed");
    if (s->pd)
        MUST(!ibv_dealloc_pd(s->pd), "the protection domain can't be destroyed");
    if (s->id)
        ZERO(rdma_destroy_id(s->id));
    if (s->listener)
        ZERO(rdma_destroy_id(s->listener));
    if (s->channel)
        rdma_destroy_event_channel(s->channel);
    free(s->bytes);
}
