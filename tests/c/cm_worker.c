/* Connects, writes and reads back, disconnects, again and again, whatever dies meanwhile: for tests/e2e/cm-death.
 *   cm_worker serve IP PORT    takes connections until it is ended; says "listening"
 *   cm_worker rounds IP PORT   connects again for each round; "round N" when one is complete, "again WHY" when one is not
 *   cm_worker steady IP PORT   one connection for ever, which nothing may disturb; "round N" for every 50 transfers
 * What takes longer than the protocol's own timeouts ends it with an error. */
#include "cm.h"
#include <sys/mman.h>

enum { ROOM = 65536, PATIENCE = 90 /* s: 16 requests of 4.3 s each, when nobody answers */ };

/* What the passive end tells the active one. */
struct room {
    uint64_t address;
    uint32_t rkey;
};

static void say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
    fflush(stdout);
}

/* The next event of a channel, acknowledged. */
static struct told next(channel *c)
{
    struct rdma_cm_event *event;
    struct told told;
    CHECK(has_event(c, PATIENCE * 1000), "no event in %d s", PATIENCE);
    CHECK(!rdma_get_cm_event(c, &event), "get_cm_event: %s", strerror(errno));
    told.event = *event;
    memset(told.data, 0, sizeof told.data);
    if (event->param.conn.private_data_len)
        memcpy(told.data, event->param.conn.private_data, event->param.conn.private_data_len);
    WORKS(rdma_ack_cm_event(event));
    return told;
}

static void *mapped_room(struct rdma_cm_id *id, struct ibv_mr **mr)
{
    void *room = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(room != MAP_FAILED, "mmap: %s", strerror(errno));
    *mr = ibv_reg_mr(id->pd, room, ROOM, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    CHECK(*mr, "reg_mr: %s", strerror(errno));
    return room;
}

static void drop_room(struct ibv_mr *mr)
{
    void *room = mr->addr;
    FAILS(ibv_dereg_mr(mr), 0);
    munmap(room, ROOM);
}

static void serve(const char *ip, int port)
{
    channel *c = new_channel();
    struct rdma_cm_id *listener = new_id(c, RDMA_PS_TCP);
    time_t end = time(NULL) + PATIENCE;
    while (rdma_bind_addr(listener, at(ip, port))) { /* the one before may not be gone yet */
        CHECK(errno == EADDRINUSE && time(NULL) < end, "bind_addr: %s", strerror(errno));
        usleep(20000);
    }
    WORKS(rdma_listen(listener, 16));
    say("listening");
    for (;;) {
        struct rdma_cm_event *event;
        WORKS(rdma_get_cm_event(c, &event));
        struct rdma_cm_id *id = event->id;
        enum rdma_cm_event_type kind = event->event;
        WORKS(rdma_ack_cm_event(event));
        struct ibv_mr *mr = id->context;
        if (kind == RDMA_CM_EVENT_CONNECT_REQUEST) {
            if (try_new_qp(id)) { /* the peer has gone already */
                CHECK(errno == EINVAL, "create_qp: %s", strerror(errno));
                drop(id);
                continue;
            }
            struct room room = {.address = (uintptr_t)mapped_room(id, &mr), .rkey = mr->rkey};
            struct rdma_conn_param param = usual();
            param.private_data = &room;
            param.private_data_len = sizeof room;
            id->context = mr;
            if (rdma_accept(id, &param)) { /* the peer has gone already */
                say("not accepted: %s", strerror(errno));
                drop_room(mr);
                drop(id);
            }
        } else if (id != listener && kind != RDMA_CM_EVENT_ESTABLISHED) {
            if (kind != RDMA_CM_EVENT_DISCONNECTED)
                say("ended by %s", rdma_event_str(kind));
            rdma_destroy_qp(id);
            drop_room(mr);
            WORKS(rdma_destroy_id(id));
        } else {
            CHECK(kind == RDMA_CM_EVENT_ESTABLISHED, "%s", rdma_event_str(kind));
        }
    }
}

/* Writes a pattern into the peer's room and reads it back; false when the connection ends, or has ended. */
static int transfer_once(struct rdma_cm_id *id, struct ibv_mr *mr, struct room room, unsigned seed, const char **why)
{
    unsigned char *half = mr->addr;
    uint32_t length = 1 + seed * 2654435761u % (ROOM / 2);
    for (uint32_t i = 0; i < length; i++)
        half[i] = seed + i;
    memset(half + ROOM / 2, 0, length);
    struct ibv_sge out = {(uintptr_t)half, length, mr->lkey}, in = {(uintptr_t)half + ROOM / 2, length, mr->lkey};
    struct ibv_send_wr *bad;
    struct ibv_send_wr get = {.wr_id = 2, .sg_list = &in, .num_sge = 1, .opcode = IBV_WR_RDMA_READ, .wr.rdma = {room.address, room.rkey}};
    struct ibv_send_wr put = {.wr_id = 1, .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = {room.address, room.rkey}, .next = &get};
    FAILS(ibv_post_send(id->qp, &put, &bad), 0);
    time_t end = time(NULL) + PATIENCE;
    for (int done = 0; done < 2;) {
        struct ibv_wc wc;
        int n = ibv_poll_cq(id->send_cq, 1, &wc);
        CHECK(n >= 0, "poll_cq");
        if (n && wc.status != IBV_WC_SUCCESS)
            return *why = ibv_wc_status_str(wc.status), 0;
        done += n;
        if (!n && has_event(id->channel, 0))
            return *why = "an event", 0;
        CHECK(time(NULL) < end, "no completion in %d s", PATIENCE);
    }
    CHECK(!memcmp(half, half + ROOM / 2, length), "other data came back");
    return 1;
}

/* A peer that dies before it knows that the connection stands refuses it: that is all that is heard then. */
static int is_end(enum rdma_cm_event_type event)
{
    return event == RDMA_CM_EVENT_DISCONNECTED || event == RDMA_CM_EVENT_REJECTED || event == RDMA_CM_EVENT_DEVICE_REMOVAL;
}

/* One connection from its beginning to its end; what was in the way, or NULL. */
static const char *one_round(channel *c, const char *ip, int port, unsigned seed, int steady)
{
    struct rdma_cm_id *id = new_id(c, RDMA_PS_TCP);
    struct ibv_mr *mr = NULL;
    const char *why = NULL;
    struct told told;
    int connected = 0;
    if (rdma_resolve_addr(id, NULL, at(ip, port), 5000)) {
        why = strerror(errno);
        goto out;
    }
    for (;;) {
        told = next(c);
        why = rdma_event_str(told.event.event);
        if (told.event.event == RDMA_CM_EVENT_ADDR_RESOLVED) {
            if (rdma_resolve_route(id, 5000))
                goto out;
        } else if (told.event.event == RDMA_CM_EVENT_ROUTE_RESOLVED) {
            new_qp(id);
            mapped_room(id, &mr);
            struct rdma_conn_param param = usual();
            if (rdma_connect(id, &param))
                goto out;
        } else if (told.event.event == RDMA_CM_EVENT_ESTABLISHED) {
            break;
        } else {
            goto out;
        }
    }
    connected = 1;
    struct room room;
    memcpy(&room, told.data, sizeof room);
    for (unsigned i = 0; steady || i < 8; i++) {
        if (!transfer_once(id, mr, room, seed + i, &why))
            goto out;
        if (steady && i % 50 == 49)
            say("round %u", i / 50);
    }
    why = NULL;
out:
    if (connected) {
        /* Nobody answers a peer's DREQ for it, but its own DISCONNECT. */
        if (!rdma_disconnect(id))
            do
                told = next(c);
            while (!is_end(told.event.event));
    }
    if (id->qp)
        rdma_destroy_qp(id);
    if (mr)
        drop_room(mr);
    WORKS(rdma_destroy_id(id));
    return why;
}

int main(int argc, char **argv)
{
    CHECK(argc == 4, "usage: cm_worker serve|rounds|steady IP PORT");
    int port = atoi(argv[3]), steady = !strcmp(argv[1], "steady");
    if (!strcmp(argv[1], "serve"))
        serve(argv[2], port);
    channel *c = new_channel();
    for (unsigned n = 0;; n++) {
        const char *why = one_round(c, argv[2], port, n * 1000, steady);
        CHECK(!steady, "the steady connection ended: %s", why);
        if (why) {
            say("again: %s", why);
            usleep(20000);
        } else {
            say("round %u", n);
        }
    }
}
