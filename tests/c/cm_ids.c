/* Ids of RDMA CM before they are connected: binding, ports, options, resolution, and calls in the wrong order.
 * CM_OTHER_IP: an address of the host that is no device's; CM_NOBODY, CM_NOBODY6: in the device's subnets, but nobody's;
 * CM_NOWHERE: without a route. Each may be unset. */
#include "cm.h"

static channel *c;

static int reuse(struct rdma_cm_id *id, int yes) { return rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes, sizeof yes); }
static int only(struct rdma_cm_id *id, int yes) { return rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &yes, sizeof yes); }

static void bind_case(void)
{
    c = new_channel();
    struct rdma_cm_id *id = new_id(c, RDMA_PS_TCP);
    WORKS(rdma_bind_addr(id, at(own_ip(), 0)));
    CHECK(port_of(id) && id->verbs && id->port_num == 1, "port %d, context %p, device port %d", port_of(id), (void *)id->verbs, id->port_num);
    CHECK(((struct sockaddr_in *)rdma_get_local_addr(id))->sin_addr.s_addr == ((struct sockaddr_in *)at(own_ip(), 0))->sin_addr.s_addr, "another address");
    REFUSES(rdma_bind_addr(id, at(own_ip(), 0)), EINVAL); /* once only */
    drop(id);
    /* To any: a port, but no device. */
    id = new_id(c, RDMA_PS_TCP);
    WORKS(rdma_bind_addr(id, at("0.0.0.0", 0)));
    CHECK(port_of(id) && !id->verbs, "port %d, context %p", port_of(id), (void *)id->verbs);
    drop(id);
    id = new_id(c, RDMA_PS_TCP);
    WORKS(rdma_bind_addr(id, at(own_ip6(), 0)));
    CHECK(port_of(id) && id->verbs, "no device for IPv6");
    drop(id);
    /* Nobody's address; an address of the host that is no device's. */
    id = new_id(c, RDMA_PS_TCP);
    REFUSES(rdma_bind_addr(id, at("198.51.100.1", 0)), EADDRNOTAVAIL);
    REFUSES(rdma_bind_addr(id, at("2001:db8::1", 0)), EADDRNOTAVAIL);
    WORKS(rdma_bind_addr(id, at(own_ip(), 0))); /* what failed has changed nothing */
    drop(id);
    if (getenv("CM_OTHER_IP")) {
        id = new_id(c, RDMA_PS_TCP);
        REFUSES(rdma_bind_addr(id, at(getenv("CM_OTHER_IP"), 0)), ENODEV);
        drop(id);
    }
    rdma_destroy_event_channel(c);
}

static void ports(void)
{
    c = new_channel();
    struct rdma_cm_id *one = new_id(c, RDMA_PS_TCP), *two = new_id(c, RDMA_PS_TCP), *udp = new_id(c, RDMA_PS_UDP);
    WORKS(rdma_bind_addr(one, at(own_ip(), 0)));
    int port = port_of(one);
    REFUSES(rdma_bind_addr(two, at(own_ip(), port)), EADDRINUSE);
    REFUSES(rdma_bind_addr(two, at("0.0.0.0", port)), EADDRNOTAVAIL); /* so Linux says of any */
    WORKS(rdma_bind_addr(udp, at(own_ip(), port))); /* another port space */
    WORKS(rdma_bind_addr(two, at(own_ip6(), port))); /* another address */
    drop(one);
    one = new_id(c, RDMA_PS_TCP);
    WORKS(rdma_bind_addr(one, at(own_ip(), port))); /* free again */
    drop(one), drop(two), drop(udp);
    /* Listening without a bind takes a port of any. */
    one = new_id(c, RDMA_PS_TCP);
    WORKS(rdma_listen(one, 1));
    CHECK(port_of(one), "no port");
    two = new_id(c, RDMA_PS_TCP);
    REFUSES(rdma_bind_addr(two, at(own_ip(), port_of(one))), EADDRNOTAVAIL);
    drop(one), drop(two);
    /* Ephemeral ports differ. */
    enum { MANY = 200 };
    static struct rdma_cm_id *ids[MANY];
    static unsigned char seen[65536];
    for (int i = 0; i < MANY; i++) {
        ids[i] = new_id(c, RDMA_PS_TCP);
        WORKS(rdma_bind_addr(ids[i], at(own_ip(), 0)));
        CHECK(port_of(ids[i]) >= 1024 && !seen[port_of(ids[i])]++, "port %d again", port_of(ids[i]));
    }
    for (int i = 0; i < MANY; i++)
        drop(ids[i]);
    rdma_destroy_event_channel(c);
}

static void reuse_address(void)
{
    c = new_channel();
    struct rdma_cm_id *one = new_id(c, RDMA_PS_TCP), *two = new_id(c, RDMA_PS_TCP), *plain = new_id(c, RDMA_PS_TCP);
    WORKS(reuse(one, 1));
    WORKS(reuse(one, 0));
    WORKS(reuse(one, 1));
    WORKS(reuse(two, 1));
    WORKS(rdma_bind_addr(one, at(own_ip(), 0)));
    int port = port_of(one);
    WORKS(rdma_bind_addr(two, at(own_ip(), port)));
    REFUSES(reuse(two, 0), EINVAL); /* not taken back from one that is bound */
    REFUSES(rdma_bind_addr(plain, at(own_ip(), port)), EADDRINUSE);
    /* Nobody listens while others have the address; alone one may. */
    REFUSES(rdma_listen(one, 1), EADDRINUSE);
    drop(two);
    WORKS(rdma_listen(one, 1));
    two = new_id(c, RDMA_PS_TCP);
    WORKS(reuse(two, 1));
    REFUSES(rdma_bind_addr(two, at(own_ip(), port)), EADDRINUSE);
    REFUSES(reuse(one, 1), EINVAL); /* it listens */
    drop(one), drop(two), drop(plain);
    rdma_destroy_event_channel(c);
}

static void families(void)
{
    c = new_channel();
    struct rdma_cm_id *six = new_id(c, RDMA_PS_TCP), *four = new_id(c, RDMA_PS_TCP);
    WORKS(rdma_bind_addr(six, at("::", 0)));
    int port = port_of(six);
    REFUSES(rdma_bind_addr(four, at("0.0.0.0", port)), EADDRNOTAVAIL); /* :: takes IPv4, too */
    drop(six);
    six = new_id(c, RDMA_PS_TCP);
    WORKS(only(six, 1));
    WORKS(only(four, 1));
    WORKS(rdma_bind_addr(six, at("::", port)));
    WORKS(rdma_bind_addr(four, at("0.0.0.0", port)));
    WORKS(rdma_listen(six, 1));
    WORKS(rdma_listen(four, 1));
    REFUSES(only(six, 0), EINVAL); /* it listens */
    drop(four), drop(six);
    rdma_destroy_event_channel(c);
}

static void privileged_port(void) /* of one who has no privilege */
{
    c = new_channel();
    struct rdma_cm_id *id = new_id(c, RDMA_PS_TCP);
    REFUSES(rdma_bind_addr(id, at(own_ip(), 1023)), EACCES);
    WORKS(rdma_bind_addr(id, at(own_ip(), 1024)));
    drop(id);
    rdma_destroy_event_channel(c);
}

static void options(void)
{
    c = new_channel();
    struct rdma_cm_id *id = new_id(c, RDMA_PS_TCP), *udp = new_id(c, RDMA_PS_UDP);
    uint8_t byte = 32;
    int word = 1;
    WORKS(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &byte, 1));
    REFUSES(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &word, sizeof word), EINVAL);
    REFUSES(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &byte, 1), EINVAL);
    REFUSES(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &byte, 1), EINVAL);
    byte = 14;
    WORKS(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &byte, 1));
    REFUSES(rdma_set_option(udp, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &byte, 1), EINVAL); /* nothing is acknowledged */
    REFUSES(rdma_set_option(id, RDMA_OPTION_ID, 99, &byte, 1), ENOSYS);
    REFUSES(rdma_set_option(id, 99, 0, &byte, 1), ENOSYS);
    drop(id), drop(udp);
    rdma_destroy_event_channel(c);
}

static void wrong_order(void)
{
    c = new_channel();
    struct rdma_cm_id *id = new_id(c, RDMA_PS_TCP);
    struct rdma_conn_param param = usual();
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT};
    int mask;
    /* Of an id that has only been made. (If that resolves a route, connects or accepts, librdmacm crashes by itself.) */
    REFUSES(rdma_reject(id, NULL, 0), EINVAL);
    REFUSES(rdma_disconnect(id), EINVAL);
    REFUSES(rdma_establish(id), EINVAL);
    REFUSES(rdma_notify(id, IBV_EVENT_COMM_EST), EINVAL);
    REFUSES(rdma_init_qp_attr(id, &attr, &mask), EINVAL);
    REFUSES(rdma_join_multicast(id, at("239.1.2.3", 0), NULL), EINVAL);
    REFUSES(rdma_leave_multicast(id, at("239.1.2.3", 0)), EADDRNOTAVAIL);
    /* Bound. */
    WORKS(rdma_bind_addr(id, at(own_ip(), 0)));
    REFUSES(rdma_resolve_route(id, 2000), EINVAL);
    REFUSES(rdma_connect(id, &param), EINVAL);
    REFUSES(rdma_accept(id, &param), EINVAL);
    REFUSES(rdma_reject(id, NULL, 0), EINVAL);
    REFUSES(rdma_disconnect(id), EINVAL);
    /* Listening. */
    WORKS(rdma_listen(id, 1));
    REFUSES(rdma_listen(id, 1), EINVAL);
    REFUSES(rdma_resolve_addr(id, NULL, at(own_ip(), 4000), 2000), EINVAL);
    REFUSES(rdma_connect(id, &param), EINVAL);
    REFUSES(rdma_accept(id, &param), EINVAL);
    REFUSES(rdma_reject(id, NULL, 0), EINVAL);
    drop(id);
    /* Resolved. */
    id = new_id(c, RDMA_PS_TCP);
    WORKS(rdma_resolve_addr(id, NULL, at(own_ip(), 4000), 2000));
    TELLS(c, ADDR_RESOLVED, 0);
    REFUSES(rdma_resolve_addr(id, NULL, at(own_ip(), 4000), 2000), EINVAL);
    REFUSES(rdma_connect(id, &param), EINVAL);
    REFUSES(rdma_listen(id, 1), EINVAL);
    WORKS(rdma_resolve_route(id, 2000));
    TELLS(c, ROUTE_RESOLVED, 0);
    REFUSES(rdma_resolve_route(id, 2000), EINVAL);
    REFUSES(rdma_accept(id, &param), EINVAL);
    REFUSES(rdma_disconnect(id), EINVAL);
    drop(id);
    SILENT(c, 0);
    rdma_destroy_event_channel(c);
}

static void resolve(void)
{
    c = new_channel();
    const char *all[] = {own_ip(), own_ip6()};
    for (int i = 0; i < 2; i++) {
        struct rdma_cm_id *id = new_resolved(c, RDMA_PS_TCP, all[i], 4000);
        CHECK(id->verbs && id->port_num == 1 && port_of(id), "not bound to a device");
        SAME(ntohs(rdma_get_dst_port(id)), 4000);
        SAME(rdma_get_local_addr(id)->sa_family, i ? AF_INET6 : AF_INET);
        SAME(id->route.num_paths, 1);
        CHECK(!memcmp(&id->route.path_rec->dgid, &id->route.addr.addr.ibaddr.dgid, 16), "the path has another GID");
        SAME(ntohs(id->route.path_rec->pkey), 0xffff);
        SAME(id->route.path_rec->packet_life_time, 18);
        drop(id);
    }
    /* With an address of one's own, bound before or named now; to another family it is refused. */
    struct rdma_cm_id *id = new_id(c, RDMA_PS_TCP);
    WORKS(rdma_resolve_addr(id, at(own_ip(), 0), at(own_ip(), 4000), 2000));
    TELLS(c, ADDR_RESOLVED, 0);
    drop(id);
    id = new_id(c, RDMA_PS_TCP);
    WORKS(rdma_bind_addr(id, at(own_ip(), 0)));
    int port = port_of(id);
    WORKS(rdma_resolve_addr(id, NULL, at(own_ip(), 4000), 2000));
    TELLS(c, ADDR_RESOLVED, 0);
    SAME(port_of(id), port);
    drop(id);
    id = new_id(c, RDMA_PS_TCP);
    REFUSES(rdma_resolve_addr(id, at(own_ip(), 0), at(own_ip6(), 4000), 2000), EINVAL);
    drop(id);
    if (getenv("CM_NOWHERE")) {
        id = new_id(c, RDMA_PS_TCP);
        if (!rdma_resolve_addr(id, NULL, at(getenv("CM_NOWHERE"), 4000), 2000)) /* Linux says it at once */
            TELLS(c, ADDR_ERROR, -ENETUNREACH);
        else
            SAME(errno, ENETUNREACH);
        drop(id);
    }
    const char *nobody[] = {getenv("CM_NOBODY"), getenv("CM_NOBODY6")};
    for (int i = 0; i < 2 && nobody[i]; i++) {
        id = new_id(c, RDMA_PS_TCP);
        WORKS(rdma_resolve_addr(id, NULL, at(nobody[i], 4000), 1000));
        TELLS(c, ADDR_ERROR, -ETIMEDOUT);
        /* And destroyed while it is looked for. */
        drop(id);
        id = new_id(c, RDMA_PS_TCP);
        WORKS(rdma_resolve_addr(id, NULL, at(nobody[i], 4000), 1000));
        drop(id);
        SILENT(c, 1200);
    }
    rdma_destroy_event_channel(c);
}

static void devices(void)
{
    int count, found = 0;
    struct ibv_context **list = rdma_get_devices(&count);
    CHECK(list && count >= 1, "%d devices", count);
    c = new_channel();
    struct rdma_cm_id *id = new_id(c, RDMA_PS_TCP);
    WORKS(rdma_bind_addr(id, at(own_ip(), 0)));
    for (int i = 0; list[i]; i++)
        found += list[i] == id->verbs;
    SAME(found, 1);
    CHECK(!strcmp(ibv_get_device_name(id->verbs->device), from_environment("DEV", "ferroce_lo")), "bound to %s", ibv_get_device_name(id->verbs->device));
    drop(id);
    rdma_destroy_event_channel(c);
    rdma_free_devices(list);
}

RUN_CM_CASES({"bind", bind_case}, {"ports", ports}, {"reuse-address", reuse_address}, {"families", families},
    {"privileged-port", privileged_port}, {"options", options}, {"wrong-order", wrong_order}, {"resolve", resolve}, {"devices", devices})
