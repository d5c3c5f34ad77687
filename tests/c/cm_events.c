/* Event channels of RDMA CM as programs use them: not blocking, in poll and epoll, from many threads, moved, dropped,
 * inherited by a child; and a device that goes.
 * CM_REMOVE: a shell command that takes the device away, for the case `removal`. */
#include "cm.h"
#include <sys/epoll.h>
#include <sys/stat.h>
#include <sys/wait.h>

static void set_nonblocking(channel *c)
{
    CHECK(!fcntl(c->fd, F_SETFL, fcntl(c->fd, F_GETFL) | O_NONBLOCK), "fcntl: %s", strerror(errno));
}

static void nonblocking(void)
{
    channel *c = new_channel();
    struct rdma_cm_event *event;
    set_nonblocking(c);
    REFUSES(rdma_get_cm_event(c, &event), EAGAIN);
    struct rdma_cm_id *id = new_id(c, RDMA_PS_TCP);
    REFUSES(rdma_get_cm_event(c, &event), EAGAIN);
    WORKS(rdma_resolve_addr(id, NULL, at(own_ip(), 4000), 2000));
    TELLS(c, ADDR_RESOLVED, 0);
    REFUSES(rdma_get_cm_event(c, &event), EAGAIN);
    SILENT(c, 0);
    drop(id);
    rdma_destroy_event_channel(c);
}

static void epoll(void)
{
    enum { CHANNELS = 5 };
    int set = epoll_create1(0), fresh = 0;
    channel *c[CHANNELS];
    struct rdma_cm_id *ids[CHANNELS];
    struct epoll_event told[CHANNELS];
    for (int i = 0; i < CHANNELS; i++) {
        c[i] = new_channel();
        ids[i] = new_id(c[i], RDMA_PS_TCP);
        struct epoll_event want = {.events = EPOLLIN | (i % 2 ? (uint32_t)EPOLLET : 0), .data.u32 = i};
        CHECK(!epoll_ctl(set, EPOLL_CTL_ADD, c[i]->fd, &want), "epoll_ctl: %s", strerror(errno));
        struct stat st;
        CHECK(!fstat(c[i]->fd, &st), "fstat: %s", strerror(errno));
    }
    SAME(epoll_wait(set, told, CHANNELS, 0), 0);
    for (int i = 0; i < CHANNELS; i++)
        WORKS(rdma_resolve_addr(ids[i], NULL, at(own_ip(), 4000), 2000));
    while (fresh < CHANNELS) {
        int n = epoll_wait(set, told, 1, 30000);
        SAME(n, 1);
        CHECK(told[0].events == EPOLLIN, "events %x", told[0].events);
        TELLS(c[told[0].data.u32], ADDR_RESOLVED, 0);
        fresh++;
    }
    SAME(epoll_wait(set, told, CHANNELS, 0), 0);
    /* A second event wakes edge-triggered waiters, too. */
    for (int i = 0; i < CHANNELS; i++) {
        WORKS(rdma_resolve_route(ids[i], 2000));
        SAME(epoll_wait(set, told, CHANNELS, 30000), 1);
        SAME(told[0].data.u32, i);
        TELLS(c[i], ROUTE_RESOLVED, 0);
    }
    for (int i = 0; i < CHANNELS; i++) {
        drop(ids[i]);
        rdma_destroy_event_channel(c[i]);
    }
    close(set);
}

static void await_events(channel *c, int count)
{
    /* The number can't be asked: what is ready stays ready, so a little time tells that all are there. */
    CHECK(has_event(c, 30000), "no event");
    usleep(100000 * count);
}

static void dropped(void)
{
    channel *c = new_channel();
    set_nonblocking(c);
    struct rdma_cm_event *event;
    struct rdma_cm_id *ids[4];
    for (int i = 0; i < 4; i++) {
        ids[i] = new_id(c, RDMA_PS_TCP);
        WORKS(rdma_resolve_addr(ids[i], NULL, at(own_ip(), 4000), 2000));
    }
    await_events(c, 4);
    drop(ids[0]), drop(ids[2]); /* their events go along */
    for (int i = 0; i < 2; i++) {
        WORKS(rdma_get_cm_event(c, &event));
        CHECK(event->id == ids[1] || event->id == ids[3], "an event of an id that is gone");
        WORKS(rdma_ack_cm_event(event));
    }
    REFUSES(rdma_get_cm_event(c, &event), EAGAIN);
    drop(ids[1]), drop(ids[3]);
    /* All of them: nothing to read is left, and nothing is ready. */
    ids[0] = new_id(c, RDMA_PS_TCP);
    WORKS(rdma_resolve_addr(ids[0], NULL, at(own_ip(), 4000), 2000));
    await_events(c, 1);
    drop(ids[0]);
    REFUSES(rdma_get_cm_event(c, &event), EAGAIN);
    SILENT(c, 0);
    rdma_destroy_event_channel(c);
}

static void *acknowledge(void *event)
{
    usleep(300000);
    WORKS(rdma_ack_cm_event(event));
    return NULL;
}

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* destroy_id waits until the events that were got are acknowledged. */
static void unacknowledged(void)
{
    channel *c = new_channel();
    struct rdma_cm_id *id = new_id(c, RDMA_PS_TCP);
    struct rdma_cm_event *event;
    WORKS(rdma_resolve_addr(id, NULL, at(own_ip(), 4000), 2000));
    WORKS(rdma_get_cm_event(c, &event));
    pthread_t thread;
    int64_t begin = now_ms();
    CHECK(!pthread_create(&thread, NULL, acknowledge, event), "no thread");
    WORKS(rdma_destroy_id(id));
    CHECK(now_ms() - begin >= 290, "destroy_id did not wait");
    pthread_join(thread, NULL);
    rdma_destroy_event_channel(c);
}

static void migrate(void)
{
    channel *from = new_channel(), *to = new_channel();
    struct rdma_cm_id *id = new_id(from, RDMA_PS_TCP), *other = new_id(from, RDMA_PS_TCP);
    /* Events that wait go along, those of others stay. */
    WORKS(rdma_resolve_addr(id, NULL, at(own_ip(), 4000), 2000));
    WORKS(rdma_resolve_addr(other, NULL, at(own_ip(), 4000), 2000));
    await_events(from, 2);
    WORKS(rdma_migrate_id(id, to));
    struct told told = next_told(to, ADDR_RESOLVED);
    CHECK(told.event.id == id && id->channel == to, "another id");
    CHECK(next_told(from, ADDR_RESOLVED).event.id == other, "another id");
    SILENT(from, 0);
    /* So do those to come. */
    WORKS(rdma_resolve_route(id, 2000));
    TELLS(to, ROUTE_RESOLVED, 0);
    drop(id), drop(other);
    /* A connected end, which then works by calls that wait, and back. */
    struct connection c = new_connection(RDMA_PS_TCP, own_ip());
    WORKS(rdma_migrate_id(c.passive, to));
    WORKS(rdma_migrate_id(c.active, NULL));
    WORKS(rdma_disconnect(c.passive));
    WORKS(rdma_migrate_id(c.active, from));
    TELLS(from, DISCONNECTED, 0);
    WORKS(rdma_disconnect(c.active));
    TELLS(to, DISCONNECTED, 0);
    SILENT(c.passive_channel, 0);
    drop_connection(&c);
    rdma_destroy_event_channel(from), rdma_destroy_event_channel(to);
}

/* A listener's new ids have the channel that it has by then. */
static void migrate_listener(void)
{
    channel *c = new_channel(), *d = new_channel(), *to = new_channel();
    struct rdma_cm_id *listener = new_listener(d, RDMA_PS_TCP, own_ip(), 4);
    WORKS(rdma_migrate_id(listener, to));
    struct rdma_conn_param param = usual();
    struct rdma_cm_id *id = new_resolved(c, RDMA_PS_TCP, own_ip(), port_of(listener));
    new_qp(id);
    WORKS(rdma_connect(id, &param));
    struct rdma_cm_id *passive = next_told(to, CONNECT_REQUEST).event.id;
    SILENT(d, 0);
    CHECK(passive->channel == to, "another channel");
    new_qp(passive);
    WORKS(rdma_accept(passive, &param));
    TELLS(c, ESTABLISHED, 0);
    TELLS(to, ESTABLISHED, 0);
    drop(id), drop(passive), drop(listener);
    rdma_destroy_event_channel(c), rdma_destroy_event_channel(d), rdma_destroy_event_channel(to);
}

/* Several channels, each with its thread, connect to one listener; and threads that share a channel take its events. */
enum { THREADS = 8, ROUNDS = 5 };
static int listener_port;

static void *connects(void *unused)
{
    channel *c = new_channel();
    struct rdma_conn_param param = usual();
    for (int i = 0; i < ROUNDS; i++) {
        struct rdma_cm_id *id = new_resolved(c, RDMA_PS_TCP, own_ip(), listener_port);
        new_qp(id);
        WORKS(rdma_connect(id, &param));
        TELLS(c, ESTABLISHED, 0);
        WORKS(rdma_disconnect(id));
        TELLS(c, DISCONNECTED, 0);
        drop(id);
    }
    rdma_destroy_event_channel(c);
    return unused;
}

static int requests, ends;
static void *serves(void *channel_)
{
    channel *c = channel_;
    struct rdma_conn_param param = usual();
    while (__atomic_load_n(&ends, __ATOMIC_SEQ_CST) < THREADS * ROUNDS) {
        struct rdma_cm_event *event;
        if (rdma_get_cm_event(c, &event)) {
            CHECK(errno == EAGAIN, "get_cm_event: %s", strerror(errno));
            has_event(c, 10);
            continue;
        }
        struct rdma_cm_id *id = event->id;
        enum rdma_cm_event_type kind = event->event;
        CHECK(event->status == 0, "%s: status %d", rdma_event_str(kind), event->status);
        if (kind == RDMA_CM_EVENT_CONNECT_REQUEST) {
            __atomic_fetch_add(&requests, 1, __ATOMIC_SEQ_CST);
            new_qp(id);
            WORKS(rdma_accept(id, &param));
        } else if (kind == RDMA_CM_EVENT_DISCONNECTED) {
            WORKS(rdma_disconnect(id));
        } else {
            CHECK(kind == RDMA_CM_EVENT_ESTABLISHED || kind == RDMA_CM_EVENT_TIMEWAIT_EXIT, "%s", rdma_event_str(kind));
        }
        WORKS(rdma_ack_cm_event(event));
        if (kind == RDMA_CM_EVENT_TIMEWAIT_EXIT) {
            drop(id);
            __atomic_fetch_add(&ends, 1, __ATOMIC_SEQ_CST);
        }
    }
    return NULL;
}

static void threads(void)
{
    channel *c = new_channel();
    set_nonblocking(c);
    struct rdma_cm_id *listener = new_listener(c, RDMA_PS_TCP, own_ip(), THREADS);
    listener_port = port_of(listener);
    pthread_t active[THREADS], passive[3];
    for (int i = 0; i < 3; i++)
        CHECK(!pthread_create(&passive[i], NULL, serves, c), "no thread");
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_create(&active[i], NULL, connects, NULL), "no thread");
    for (int i = 0; i < THREADS; i++)
        pthread_join(active[i], NULL);
    for (int i = 0; i < 3; i++)
        pthread_join(passive[i], NULL);
    SAME(requests, THREADS * ROUNDS);
    SILENT(c, 0);
    drop(listener);
    rdma_destroy_event_channel(c);
}

/* A child of a process that uses RDMA CM makes channels of its own, and connects to its parent; what it inherited stays
 * the parent's. */
static void forked(void)
{
    struct connection c = new_connection(RDMA_PS_TCP, own_ip());
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0, "fork: %s", strerror(errno));
    if (!child) {
        channel *own = new_channel();
        struct rdma_conn_param param = usual();
        struct rdma_cm_id *id = new_resolved(own, RDMA_PS_TCP, own_ip(), port_of(c.listener));
        /* No queue pair: the device that is open is the parent's. */
        WORKS(rdma_connect(id, &param));
        TELLS(own, REJECTED, 28);
        WORKS(rdma_destroy_id(id));
        rdma_destroy_event_channel(own);
        _exit(0);
    }
    struct told told = next_told(c.passive_channel, CONNECT_REQUEST);
    WORKS(rdma_reject(told.event.id, NULL, 0));
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child failed: status %x", status);
    drop(told.event.id);
    SILENT(c.passive_channel, 0); /* the end of the child is not the end of the parent's connections */
    SILENT(c.active_channel, 0);
    send_between(c.active, c.passive, 100);
    WORKS(rdma_disconnect(c.active));
    TELLS(c.passive_channel, DISCONNECTED, 0);
    drop_connection(&c);
}

/* Ids, one after the other and many at once. */
static void many_ids(void)
{
    enum { AT_ONCE = 1000 };
    static struct rdma_cm_id *ids[AT_ONCE];
    channel *c = new_channel();
    for (int i = 0; i < AT_ONCE; i++) {
        ids[i] = new_id(c, i % 2 ? RDMA_PS_TCP : RDMA_PS_UDP);
        ids[i]->context = &ids[i];
        WORKS(rdma_resolve_addr(ids[i], NULL, at(own_ip(), 4000), 2000));
    }
    for (int i = 0; i < AT_ONCE; i++) {
        struct told told = next_told(c, ADDR_RESOLVED);
        CHECK(told.event.id->context >= (void *)ids && *(struct rdma_cm_id **)told.event.id->context == told.event.id, "another id");
    }
    SILENT(c, 0);
    for (int i = 0; i < AT_ONCE; i++)
        drop(ids[i]);
    rdma_destroy_event_channel(c);
    for (int i = 0; i < 100; i++)
        rdma_destroy_event_channel(new_channel());
}

/* The next event of a channel, but for the end of a connection whose other end was told first. */
static struct rdma_cm_id *removed(channel *c)
{
    for (;;) {
        struct rdma_cm_event *event;
        CHECK(has_event(c, 30000), "no event in 30 s");
        WORKS(rdma_get_cm_event(c, &event));
        struct rdma_cm_id *id = event->id;
        enum rdma_cm_event_type kind = event->event;
        WORKS(rdma_ack_cm_event(event));
        if (kind == RDMA_CM_EVENT_DEVICE_REMOVAL)
            return id;
        CHECK(kind == RDMA_CM_EVENT_DISCONNECTED || kind == RDMA_CM_EVENT_TIMEWAIT_EXIT, "%s", rdma_event_str(kind));
    }
}

static void removal(void)
{
    const char *remove_it = from_environment("CM_REMOVE", NULL);
    CHECK(remove_it, "CM_REMOVE is not set");
    struct connection c = new_connection(RDMA_PS_TCP, own_ip());
    channel *other = new_channel(), *any = new_channel();
    struct rdma_cm_id *resolved = new_resolved(other, RDMA_PS_TCP, own_ip(), 4000);
    struct rdma_cm_id *unbound = new_id(other, RDMA_PS_TCP), *anywhere = new_listener(any, RDMA_PS_TCP, "0.0.0.0", 1);
    CHECK(!system(remove_it), "%s failed", remove_it);
    /* All that are bound to it are told, whatever they do. */
    for (int i = 0; i < 2; i++) {
        struct rdma_cm_id *id = removed(c.passive_channel);
        CHECK(id == c.passive || id == c.listener, "another id");
    }
    CHECK(removed(c.active_channel) == c.active && removed(other) == resolved, "another id");
    SILENT(any, 100);
    struct rdma_conn_param param = usual();
    errno = 0;
    CHECK(rdma_connect(resolved, &param) == -1 && errno, "it still connects");
    drop(resolved), drop(unbound), drop(anywhere);
    drop_connection(&c);
    rdma_destroy_event_channel(other), rdma_destroy_event_channel(any);
}

RUN_CM_CASES({"nonblocking", nonblocking}, {"epoll", epoll}, {"dropped", dropped}, {"unacknowledged", unacknowledged},
    {"migrate", migrate}, {"migrate-listener", migrate_listener}, {"threads", threads}, {"forked", forked},
    {"many-ids", many_ids}, {"removal", removal})
