/* ops: every verbs operation between two devices, and every error that one side can make the other see.
 *
 * Two processes of this program do a case together, one as requester, one as responder; each checks its completions field
 * by field and all of its memory. They agree over TCP. See main.c for how it is called, and for the list of cases. */
#ifndef OPS_H
#define OPS_H
#include <infiniband/verbs.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    AREA = 10 << 20, /* bytes of an area */
    DEPTH = 64,      /* sends outstanding */
    MOST = 256,      /* messages of a flow, and receives of a queue */
    SGES = 16,       /* entries of a list */
    INLINE = 128,    /* bytes */
    PATIENCE = 20,   /* seconds that a completion or the peer may take */
    GRH = 40,        /* bytes in front of a datagram */
    QKEY = 0x11111111,
    BLANK = 0xee,    /* what memory holds that nothing was written to */
    SPOILT = 0xdd,   /* what the sender of inline data writes over it at once */
};

/* Memory that one side's requests read and write, or that the peer's do, with what it should hold at the end. */
struct area {
    uint8_t *bytes, *model;
    struct ibv_mr *mr;
};

/* What one side tells the other of a queue pair. */
struct remote {
    union ibv_gid gid;
    uint32_t qpn, psn, rkey;
    uint64_t addr;
};

struct options {
    enum ibv_qp_type type;
    int rd_atomic;  /* READs and atomics that it asks for at once */
    int dest_rd_atomic; /* and that it takes */
    int timeout, retry, rnr_retry, min_rnr_timer;
    int access;
    bool shared;    /* receives come from an SRQ */
    bool notified;  /* the completion queues have a channel */
};

struct pair {
    struct options options;
    struct ibv_comp_channel *channel;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp *qp;
    uint32_t psn;
    struct remote remote;
};

struct session {
    int peer;               /* the TCP connection */
    bool client, requester;
    bool rxe, peer_rxe;     /* a device is Linux's Soft-RoCE, with quirks of its own */
    bool lossy;             /* the network loses packets on purpose */
    int gid_index, mtu;
    struct ibv_context *context;
    struct ibv_pd *pd;
    union ibv_gid gid;
    struct area out, in;    /* of this side's requests, and of the peer's */
    uint32_t number;        /* of the case */
    struct pair pairs[8];   /* what the case has made, for its end */
    int pair_count;
    struct ibv_mr *regions[8];
    int region_count;
    struct ibv_mw *windows[8];
    int window_count;
    jmp_buf failed;
    char verdict[300], peer_verdict[300];
    bool peer_gave_verdict;
};

/* A case that can't be done, or went wrong: it ends here. */
void fail(struct session *s, const char *format, ...) __attribute__((format(printf, 2, 3), noreturn));
void skip(struct session *s, const char *format, ...) __attribute__((format(printf, 2, 3), noreturn));
#define MUST(condition, ...) ((condition) ? (void)0 : fail(s, __VA_ARGS__))

/* control.c: the connection between the two sides. */
struct parameters {
    int32_t gid_index, mtu;
    uint32_t lossy, rxe;
};
struct order {
    char name[48];
    uint32_t server_requests;
};
enum { ROOM = 1024 }; /* bytes of data in a frame */
struct frame {
    char type;
    uint32_t number, length;
    uint8_t data[ROOM + 1];
};
void write_frame(int fd, char type, uint32_t number, const void *data, uint32_t length);
bool read_frame(int fd, struct frame *frame);
void sync_peer(struct session *s);
void swap(struct session *s, const void *mine, void *theirs, uint32_t length);
void notice_end(struct session *s);
double now(void);

/* objects.c: queue pairs and memory. */
void open_session(struct session *s, const char *device, const struct parameters *parameters);
void close_case(struct session *s);
struct options defaults(const struct session *s, enum ibv_qp_type type);
struct pair *make_pair(struct session *s, const struct options *options);
void connect_pair(struct session *s, struct pair *pair);
struct ibv_mr *register_memory(struct session *s, void *addr, size_t length, int access);
struct ibv_mw *bind_window(struct session *s, struct pair *pair, struct ibv_mr *mr, uint64_t offset, uint64_t length, int access);
enum ibv_qp_state state_of(struct session *s, struct ibv_qp *qp);
int next_event(struct session *s, int milliseconds);

/* completions.c: what completes, and how. */
enum { ANY = -1 };
struct expected {
    uint64_t wr_id;
    enum ibv_wc_status status;
    enum ibv_wc_opcode opcode;
    int64_t length;  /* ANY where it means nothing */
    unsigned flags;
    uint32_t imm;    /* with IBV_WC_WITH_IMM, or the key with IBV_WC_WITH_INV */
    int64_t source;  /* QPN of the sender, or ANY */
};
bool try_completion(struct session *s, struct ibv_cq *cq, struct ibv_wc *wc);
void next_completion(struct session *s, struct ibv_cq *cq, struct ibv_wc *wc);
void check_completion(struct session *s, const struct pair *pair, const struct ibv_wc *wc, const struct expected *expected);
void expect(struct session *s, const struct pair *pair, struct ibv_cq *cq, const struct expected *expected);
void expect_status(struct session *s, const struct pair *pair, struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_status status);
void expect_nothing(struct session *s, struct ibv_cq *cq, int milliseconds);

/* flow.c: messages from one side to the other. */
struct message {
    enum ibv_wr_opcode opcode;
    uint32_t length;
    int gather, scatter;  /* entries of the lists of the requester and of the receive */
    unsigned flags;
    uint32_t invalidate;  /* key of the responder's window */
    size_t offset;        /* in both areas */
};
struct flow {
    struct message messages[MOST];
    int count;
    unsigned seed;
};
void add(struct session *s, struct flow *flow, enum ibv_wr_opcode opcode, uint32_t length);
void run_flow(struct session *s, struct pair *pair, struct flow *flow);
void run_flows(struct session *s, struct pair *pair, struct flow *out, struct flow *in);
void fill_pattern(uint8_t *bytes, size_t length, unsigned index, unsigned seed);
void post_receive(struct session *s, struct pair *pair, uint64_t wr_id, struct ibv_sge *sges, int count);
void post(struct session *s, struct pair *pair, struct ibv_send_wr *wr);
struct ibv_sge entry(const struct area *area, size_t offset, uint32_t length);

/* The cases. */
struct test {
    const char *name;
    void (*run)(struct session *s);
};
extern const struct test data_tests[], unreliable_tests[], error_tests[], window_tests[];

/* death.c: one side is killed in the middle. */
void stream_until_death(struct session *s, bool victim);
#endif
