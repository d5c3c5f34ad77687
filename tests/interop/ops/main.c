/* The command line, and who does which case when.
 *
 *   ops -d DEVICE -g GID-INDEX -p PORT                            the server: it serves until it is killed
 *   ops -d DEVICE -g GID-INDEX -p PORT -c ADDRESS [-m PATH-MTU] [-l LABEL] [-o REGEX]... [-x]
 *                                                                 the client: it does the cases that match, in both directions
 * GID-INDEX is the same on both sides. -x: the network loses packets.
 *
 * A case is LABEL/NAME/DIRECTION: "out" when the client is the requester, "in" when the server is. It is done if all
 * REGEX match that. For each the client prints a line of TAP. */
#include "ops.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <regex.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static struct session session;
static const struct test *const lists[] = {data_tests, window_tests, unreliable_tests, error_tests};
static const char *device, *label = "ops";
static regex_t only[4];
static int only_count;

static void give_up(struct session *s, const char *prefix, const char *format, va_list arguments)
{
    int n = snprintf(s->verdict, sizeof s->verdict, "%s", prefix);
    vsnprintf(s->verdict + n, sizeof s->verdict - (size_t)n, format, arguments);
    longjmp(s->failed, 1);
}

void fail(struct session *s, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    give_up(s, s->requester ? "requester: " : "responder: ", format, arguments);
    __builtin_unreachable();
}

void skip(struct session *s, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    give_up(s, "SKIP ", format, arguments);
    __builtin_unreachable();
}

static _Noreturn void die(const char *what)
{
    fprintf(stderr, "ops: %s: %s\n", what, errno ? strerror(errno) : "no");
    exit(1);
}

static void run_test(struct session *s, const char *name)
{
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (const struct test *test = lists[i]; test->name; test++)
            if (!strcmp(test->name, name)) {
                test->run(s);
                return;
            }
    fail(s, "no case %s", name);
}

/* Does one side of a case. Both sides know then how it ended: "" when all was well. */
static const char *do_case(struct session *s, const char *name)
{
    static char verdict[2 * sizeof s->verdict];
    struct frame frame;
    s->verdict[0] = s->peer_verdict[0] = 0;
    s->peer_gave_verdict = false;
    bool died = !strncmp(name, "death/", 6);
    if (!setjmp(s->failed)) {
        if (died)
            stream_until_death(s, !strcmp(name, "death/requester") == s->requester);
        else
            run_test(s, name);
    }
    close_case(s);
    write_frame(s->peer, 'V', s->number, s->verdict, (uint32_t)strlen(s->verdict));
    if (died)
        return s->verdict;
    while (!s->peer_gave_verdict) {
        if (!read_frame(s->peer, &frame)) {
            snprintf(s->peer_verdict, sizeof s->peer_verdict, "the other side is gone");
            break;
        }
        if (frame.type == 'V' && frame.number == s->number) {
            snprintf(s->peer_verdict, sizeof s->peer_verdict, "%.290s", (char *)frame.data);
            break;
        }
    }
    /* The one that ended the case knows why. */
    const char *first = s->peer_verdict, *second = s->verdict;
    if (!strncmp(second, "SKIP", 4))
        first = second, second = "";
    if (!strncmp(first, "SKIP", 4))
        second = "";
    snprintf(verdict, sizeof verdict, "%s%s%s", first, *first && *second ? "; " : "", second);
    return verdict;
}

/* Whether the user and who wrote this list want it. */
static bool selected(const char *name, bool out)
{
    char full[200];
    snprintf(full, sizeof full, "%s/%s/%s", label, name, out ? "out" : "in");
    for (int i = 0; i < only_count; i++)
        if (regexec(&only[i], full, 0, NULL, 0))
            return false;
    return true;
}

static void report(const char *name, bool out, const char *verdict)
{
    if (!*verdict)
        printf("ok %s/%s/%s\n", label, name, out ? "out" : "in");
    else if (!strncmp(verdict, "SKIP ", 5))
        printf("ok %s/%s/%s # %s\n", label, name, out ? "out" : "in", verdict);
    else
        printf("not ok %s/%s/%s: %s\n", label, name, out ? "out" : "in", verdict);
    fflush(stdout);
}

static int connect_to(const char *address, int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct timeval patience = {.tv_sec = 2 * PATIENCE};
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    inet_pton(AF_INET, address, &to.sin_addr);
    if (connect(fd, (void *)&to, sizeof to))
        die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    return fd;
}

/* Opens the device, and tells the other side what it is. */
static void begin(struct session *s, int fd, const struct parameters *mine)
{
    struct frame frame;
    struct parameters theirs;
    s->peer = fd;
    if (setjmp(s->failed)) {
        fprintf(stderr, "ops: %s\n", s->verdict);
        exit(1);
    }
    s->rxe = mine->rxe;
    write_frame(fd, 'P', 0, mine, sizeof *mine);
    if (!read_frame(fd, &frame) || frame.type != 'P' || frame.length != sizeof theirs)
        fail(s, "the other side does not begin");
    memcpy(&theirs, frame.data, sizeof theirs);
    s->peer_rxe = theirs.rxe;
    open_session(s, device, s->client ? mine : &theirs);
}

/* The server's side of a connection, in a process of its own. */
static void serve(int fd, struct parameters mine)
{
    struct frame frame;
    struct order order;
    begin(&session, fd, &mine);
    while (read_frame(fd, &frame)) {
        if (frame.type != 'R' || frame.length != sizeof order)
            continue;
        memcpy(&order, frame.data, sizeof order);
        session.requester = order.server_requests;
        session.number = frame.number;
        alarm(4 * PATIENCE);
        do_case(&session, order.name);
    }
    exit(0);
}

static void server(int port, struct parameters mine)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 4))
        die("listen");
    signal(SIGCHLD, SIG_IGN);
    puts("LISTENS");
    fflush(stdout);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            continue;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (fork() == 0)
            serve(fd, mine);
        close(fd);
    }
}

static const char *client_case(struct session *s, const char *name, bool out, unsigned number)
{
    struct order order = {.server_requests = !out};
    snprintf(order.name, sizeof order.name, "%s", name);
    s->requester = out;
    s->number = number;
    write_frame(s->peer, 'R', number, &order, sizeof order);
    alarm(4 * PATIENCE);
    return do_case(s, name);
}

/* All cases that match, over one connection; or one case, under a name that says after what. */
static void all_cases(int fd, const struct parameters *mine, const char *after)
{
    unsigned number = 0;
    char name[96];
    begin(&session, fd, mine);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (const struct test *test = lists[i]; test->name; test++)
            for (int out = 1; out >= 0; out--) {
                number++;
                snprintf(name, sizeof name, "%s%s", after ? after : "", test->name);
                if (after ? !strcmp(test->name, "rc/mixed-1") : selected(name, out))
                    report(name, out, client_case(&session, test->name, out, number));
            }
    exit(0);
}

/* A child that does not end by itself is a case that fails. */
static void await(pid_t child, const char *what)
{
    int status;
    waitpid(child, &status, 0);
    if (status)
        printf("not ok %s/%s: the client ends with status %d, signal %d\n", label, what, WEXITSTATUS(status), WTERMSIG(status));
    fflush(stdout);
}

/* One side dies; then new processes do a case. */
static void death(const char *address, int port, const struct parameters *mine, const char *name, bool out)
{
    int fd = connect_to(address, port), status;
    bool ours = !strcmp(name, "death/requester") == out;
    pid_t child = fork();
    if (child == 0) {
        begin(&session, fd, mine);
        const char *verdict = client_case(&session, name, out, 1);
        report(name, out, verdict);
        exit(0);
    }
    if (ours) {
        struct frame frame = {.type = 0};
        waitpid(child, &status, 0);
        bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        while (killed && frame.type != 'V' && read_frame(fd, &frame)) {}
        report(name, out, !killed ? "the victim did not die" : frame.type == 'V' ? (char *)frame.data : "the survivor says nothing");
    } else {
        await(child, name);
    }
    close(fd);
    fd = connect_to(address, port);
    child = fork();
    if (child == 0) {
        char after[64];
        snprintf(after, sizeof after, "after-%s-%s/", strrchr(name, '/') + 1, ours ? "client" : "server");
        all_cases(fd, mine, after);
    }
    await(child, "after-death");
    close(fd);
}

static void client(const char *address, int port, const struct parameters *mine)
{
    bool any = false;
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (const struct test *test = lists[i]; test->name; test++)
            any |= selected(test->name, true) || selected(test->name, false);
    if (any) {
        int fd = connect_to(address, port);
        pid_t child = fork();
        if (child == 0)
            all_cases(fd, mine, NULL);
        await(child, "session");
        close(fd);
    }
    for (int i = 0; i < 4; i++) {
        const char *name = i / 2 ? "death/responder" : "death/requester";
        if (selected(name, i % 2 == 0))
            death(address, port, mine, name, i % 2 == 0);
    }
}

int main(int argc, char **argv)
{
    struct parameters mine = {.mtu = 1024};
    const char *address = NULL;
    int port = 18600, option;
    while ((option = getopt(argc, argv, "d:g:p:c:m:o:l:x")) != -1)
        switch (option) {
        case 'd': device = optarg; break;
        case 'g': mine.gid_index = atoi(optarg); break;
        case 'p': port = atoi(optarg); break;
        case 'c': address = optarg; break;
        case 'm': mine.mtu = atoi(optarg); break;
        case 'l': label = optarg; break;
        case 'x': mine.lossy = 1; break;
        case 'o':
            if (only_count == sizeof only / sizeof *only || regcomp(&only[only_count++], optarg, REG_EXTENDED | REG_NOSUB))
                die("-o REGEX");
            break;
        default: return 2;
        }
    if (!device)
        die("-d DEVICE is missing");
    mine.rxe = !strncmp(device, "rxe", 3);
    signal(SIGPIPE, SIG_IGN);
    session.client = address != NULL;
    if (address)
        client(address, port, &mine);
    else
        server(port, mine);
    return 0;
}
