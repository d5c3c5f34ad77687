/* RDMA CM, step by step: ids, events, and two ends of a connection in one process. For the test programs here.
 * CM_IP, CM_IP6: addresses of the device (127.0.0.1, ::1). */
#ifndef CM_H
#define CM_H
#include "verbs_any.h"
#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

/* Calls that return 0, or -1 and set errno. */
#define WORKS(call) CHECK(!(call), "%s:%d: " #call ": %s", __FILE__, __LINE__, strerror(errno))
#define REFUSES(call, wanted) do { errno = 0; int rc_ = (call); CHECK(rc_ == -1 && errno == (wanted), \
    "%s:%d: " #call " gives %d, %s, not %s", __FILE__, __LINE__, rc_, strerror(errno), strerror(wanted)); } while (0)
#define SAME(got, wanted) do { long long got_ = (got), wanted_ = (wanted); CHECK(got_ == wanted_, \
    "%s:%d: " #got " is %lld, not %lld", __FILE__, __LINE__, got_, wanted_); } while (0)

typedef struct rdma_event_channel channel;

/* An event, with its private data, that outlives its acknowledgement. */
struct told {
    struct rdma_cm_event event;
    unsigned char data[256];
};

static inline const char *from_environment(const char *name, const char *otherwise) { return getenv(name) ? getenv(name) : otherwise; }
static inline const char *own_ip(void) { return from_environment("CM_IP", "127.0.0.1"); }
static inline const char *own_ip6(void) { return from_environment("CM_IP6", "::1"); }

/* An address of either family; valid until the eighth call from now. Port in host order. */
static inline struct sockaddr *at(const char *ip, int port)
{
    static struct sockaddr_in6 ring[8];
    static int next;
    struct sockaddr_in6 *a = &ring[next++ % 8];
    struct sockaddr_in *a4 = (struct sockaddr_in *)a;
    memset(a, 0, sizeof *a);
    if (inet_pton(AF_INET, ip, &a4->sin_addr) == 1) {
        a4->sin_family = AF_INET;
        a4->sin_port = htons(port);
    } else {
        CHECK(inet_pton(AF_INET6, ip, &a->sin6_addr) == 1, "no address: %s", ip);
        a->sin6_family = AF_INET6;
        a->sin6_port = htons(port);
    }
    return (struct sockaddr *)a;
}

static inline channel *new_channel(void)
{
    channel *c = rdma_create_event_channel();
    CHECK(c, "create_event_channel: %s", strerror(errno));
    return c;
}

static inline struct rdma_cm_id *new_id(channel *c, enum rdma_port_space ps)
{
    struct rdma_cm_id *id;
    CHECK(!rdma_create_id(c, &id, NULL, ps), "create_id: %s", strerror(errno));
    return id;
}

static inline int has_event(channel *c, int milliseconds) { return readable(c->fd, milliseconds); }

/* The next event of a channel, which must be of that kind; at most 30 s from now. */
static inline struct told next_told_at(const char *file, int line, channel *c, enum rdma_cm_event_type wanted)
{
    struct rdma_cm_event *event;
    struct told told;
    CHECK(has_event(c, 30000), "%s:%d: no event in 30 s, %s awaited", file, line, rdma_event_str(wanted));
    CHECK(!rdma_get_cm_event(c, &event), "%s:%d: get_cm_event: %s", file, line, strerror(errno));
    told.event = *event;
    int ud = event->id->qp_type == IBV_QPT_UD;
    const void *data = ud ? event->param.ud.private_data : event->param.conn.private_data;
    int length = ud ? event->param.ud.private_data_len : event->param.conn.private_data_len;
    memset(told.data, 0, sizeof told.data);
    if (length)
        memcpy(told.data, data, length);
    CHECK(!rdma_ack_cm_event(event), "ack_cm_event: %s", strerror(errno));
    CHECK(told.event.event == wanted, "%s:%d: %s, status %d, not %s", file, line, rdma_event_str(told.event.event),
          told.event.status, rdma_event_str(wanted));
    return told;
}
#define next_told(channel, kind) next_told_at(__FILE__, __LINE__, channel, RDMA_CM_EVENT_##kind)
/* The same, and its status. */
#define TELLS(channel, kind, wanted) do { int status_ = next_told(channel, kind).event.status; CHECK(status_ == (wanted), \
    "%s:%d: " #kind " with status %d, not %d", __FILE__, __LINE__, status_, (wanted)); } while (0)
#define SILENT(channel, milliseconds) CHECK(!has_event(channel, milliseconds), "%s:%d: an event too many", __FILE__, __LINE__)

static inline struct rdma_cm_id *new_listener(channel *c, enum rdma_port_space ps, const char *ip, int backlog)
{
    struct rdma_cm_id *id = new_id(c, ps);
    WORKS(rdma_bind_addr(id, at(ip, 0)));
    WORKS(rdma_listen(id, backlog));
    return id;
}

static inline int port_of(struct rdma_cm_id *id) { return ntohs(rdma_get_src_port(id)); }

/* An id with address and route resolved. */
static inline struct rdma_cm_id *new_resolved(channel *c, enum rdma_port_space ps, const char *ip, int port)
{
    struct rdma_cm_id *id = new_id(c, ps);
    WORKS(rdma_resolve_addr(id, NULL, at(ip, port), 2000));
    TELLS(c, ADDR_RESOLVED, 0);
    WORKS(rdma_resolve_route(id, 2000));
    TELLS(c, ROUTE_RESOLVED, 0);
    return id;
}

/* A queue pair with CQs and a PD of librdmacm's own; EINVAL where the connection that the id is for has ended. */
static inline int try_new_qp(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr init = {.qp_type = id->qp_type, .sq_sig_all = 1,
        .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1}};
    return rdma_create_qp(id, NULL, &init);
}

static inline void new_qp(struct rdma_cm_id *id) { WORKS(try_new_qp(id)); }

static inline void drop(struct rdma_cm_id *id)
{
    if (id->qp)
        rdma_destroy_qp(id);
    WORKS(rdma_destroy_id(id));
}

/* Two ends and what they hang on; channels of their own, as their events come in no order among each other. */
struct connection {
    channel *active_channel, *passive_channel;
    struct rdma_cm_id *listener, *active, *passive;
    struct told request, established; /* what the passive and the active end were told */
};

static inline struct rdma_conn_param usual(void)
{
    return (struct rdma_conn_param){.responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7};
}

/* A connection request under way: `passive` waits to be accepted or rejected. */
static inline struct connection new_request(enum rdma_port_space ps, const char *ip, struct rdma_conn_param *param)
{
    struct connection c = {.active_channel = new_channel(), .passive_channel = new_channel()};
    struct rdma_conn_param plain = usual();
    c.listener = new_listener(c.passive_channel, ps, ip, 8);
    c.active = new_resolved(c.active_channel, ps, ip, port_of(c.listener));
    new_qp(c.active);
    WORKS(rdma_connect(c.active, param ? param : &plain));
    c.request = next_told(c.passive_channel, CONNECT_REQUEST);
    CHECK(c.request.event.listen_id == c.listener, "another listener");
    c.passive = c.request.event.id;
    return c;
}

/* Accepts it; both ends are established. */
static inline void accept_request(struct connection *c, struct rdma_conn_param *param)
{
    struct rdma_conn_param plain = usual();
    new_qp(c->passive);
    WORKS(rdma_accept(c->passive, param ? param : &plain));
    c->established = next_told(c->active_channel, ESTABLISHED);
    if (c->passive->qp_type != IBV_QPT_UD)
        TELLS(c->passive_channel, ESTABLISHED, 0);
}

static inline struct connection new_connection(enum rdma_port_space ps, const char *ip)
{
    struct connection c = new_request(ps, ip, NULL);
    accept_request(&c, NULL);
    return c;
}

static inline void drop_connection(struct connection *c)
{
    struct rdma_cm_id *ids[] = {c->active, c->passive, c->listener};
    for (int i = 0; i < 3; i++)
        if (ids[i])
            drop(ids[i]);
    rdma_destroy_event_channel(c->active_channel);
    rdma_destroy_event_channel(c->passive_channel);
}

/* One message from one end to the other, checked byte for byte. */
static inline void send_between(struct rdma_cm_id *from, struct rdma_cm_id *to, uint32_t length)
{
    unsigned char *out = malloc(length), *in = calloc(1, length);
    struct ibv_mr *out_mr = rdma_reg_msgs(from, out, length), *in_mr = rdma_reg_msgs(to, in, length);
    struct ibv_wc wc;
    CHECK(out_mr && in_mr, "reg_msgs: %s", strerror(errno));
    for (uint32_t i = 0; i < length; i++)
        out[i] = i * 7 + 1;
    WORKS(rdma_post_recv(to, NULL, in, length, in_mr));
    WORKS(rdma_post_send(from, NULL, out, length, out_mr, 0));
    CHECK(rdma_get_send_comp(from, &wc) == 1 && wc.status == IBV_WC_SUCCESS, "send: %s", ibv_wc_status_str(wc.status));
    CHECK(rdma_get_recv_comp(to, &wc) == 1 && wc.status == IBV_WC_SUCCESS, "receive: %s", ibv_wc_status_str(wc.status));
    CHECK(!memcmp(out, in, length), "other data arrived");
    WORKS(rdma_dereg_mr(out_mr));
    WORKS(rdma_dereg_mr(in_mr));
    free(out);
    free(in);
}

/* Runs the case that the program's only argument names. */
static inline int run_cm_case(int argc, char **argv, const struct test_case *cases, size_t count)
{
    alarm(100);
    for (size_t i = 0; i < count; i++)
        if (argc == 2 && !strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            puts("ok");
            return 0;
        }
    die("usage: %s CASE", argv[0]);
}
#define RUN_CM_CASES(...) int main(int argc, char **argv) { static const struct test_case cases[] = {__VA_ARGS__}; \
    return run_cm_case(argc, argv, cases, sizeof cases / sizeof *cases); }
#endif
