/* connections: what RDMA CM does between two machines, event by event and byte by byte.
 *
 * Two processes of this program do a case together: one is active (it connects), one is passive (it listens). They agree
 * over TCP. See main.c for how it is called, and cases.c and faults.c for what is done. */
#ifndef CONNECTIONS_H
#define CONNECTIONS_H
#include <rdma/rdma_cma.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    /* Bytes of private data that events of the kernel have, whatever the peer sent: the rest is zero. */
    REQ_ROOM = 56,
    REP_ROOM = 196,
    REJ_ROOM = 148,
    SIDR_REQ_ROOM = 180,
    SIDR_REP_ROOM = 136,
    MESSAGE = 4096, /* bytes of a message of data, and of a datagram a quarter */
    GRH = 40,       /* bytes in front of a datagram */
    NO_LISTENER = 8,
    CONSUMER = 28,
};

/* An event, kept after it was acknowledged. */
struct event {
    enum rdma_cm_event_type type;
    int status;
    struct rdma_cm_id *id, *listener;
    struct rdma_conn_param conn;
    struct rdma_ud_param ud;
    uint8_t private_data[256];
    int length;
};

/* One side of a case. */
struct session {
    int peer; /* the TCP connection */
    bool active;
    int patience; /* seconds that an event may take */
    enum rdma_port_space space;
    struct sockaddr_storage from, to; /* the active side's address and the passive one's, as this side writes them */
    struct rdma_event_channel *channel;
    struct rdma_cm_id *listener, *id;
    struct event event; /* the last one */
    /* The queue pair. It is the id's, or (`apart`) of nobody: then librdmacm does not see it. */
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *apart;
    struct ibv_mr *mr;
    uint8_t *bytes; /* what is sent, then what is received */
    struct ibv_wc wc; /* a completion that `arrived` has found, */
    bool found;       /* ... for `exchange` */
    char verdict[300];
};

/* A case; it ends by `fail`, or is done when it returns. */
struct test {
    const char *name;
    void (*active)(struct session *);
    void (*passive)(struct session *);
    int number; /* of bytes, where the name has one */
    bool who_dies; /* with it: the active side (1) or the passive one (0) */
    bool deadly;
};
extern const struct test connection_tests[], fault_tests[];
extern const struct test *current;

/* cases.c */
struct rdma_conn_param parameters(int private_length);
void connect_with(struct session *, int sent, int answered);
void accept_with(struct session *, int sent, int received);
void use_and_part(struct session *);
void request_active(struct session *);
void request_passive(struct session *);
void reject_active(struct session *);
void datagrams_accept(struct session *, int sent, int received);
void sidr_request_active(struct session *);

/* main.c */
_Noreturn void fail(struct session *, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define MUST(condition, ...) ((condition) ? (void)0 : fail(s, __VA_ARGS__))
#define ZERO(call) MUST((call) == 0, "%s: %s", #call, strerror(errno))
double now(void);
void sync_peer(struct session *);           /* both sides have come here */
void tell(struct session *, uint32_t);      /* gives the peer a number, ... */
uint32_t hear(struct session *);            /* ... which this awaits */
bool peer_gave_up(struct session *);
bool peer_speaks(struct session *);         /* it has come to where this side will hear it */

/* steps.c */
void expect(struct session *, enum rdma_cm_event_type, int status);
void expect_either(struct session *, enum rdma_cm_event_type, int status, enum rdma_cm_event_type other, int other_status);
bool event_waits(struct session *);
bool arrived(struct session *);
void expect_none(struct session *, int milliseconds);
void expect_private(struct session *, int room, int sent);
const uint8_t *private_bytes(void);
void open_channel(struct session *);
void listen_here(struct session *, int backlog);
void take_request(struct session *);
void resolve(struct session *);
void resolve_to(struct session *, uint16_t port);
void make_qp(struct session *);
void make_qp_apart(struct session *);
void bring_up(struct session *, enum ibv_qp_state);
void exchange(struct session *);
void part(struct session *);
void close_all(struct session *);
#endif
