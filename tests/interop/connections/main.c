/* The command line, and who does which case when.
 *
 *   connections -i INTERFACE -p PORT                              the server: it serves until it is killed
 *   connections -i INTERFACE -p PORT -c ADDRESS -a OURS -b THEIRS [-t SECONDS] [-l LABEL] [-o REGEX]...
 *                                                                 the client: it does the cases that match, in both directions
 * ADDRESS is where the server is reached by TCP; OURS and THEIRS are the addresses that RDMA CM uses, and INTERFACE the
 * scope of the link-local ones. SECONDS: for one event (20).
 *
 * A case is LABEL/NAME/DIRECTION: "out" when the client is the active side, "in" when the server is. It is done if all
 * REGEX match that. For each the client prints a line of TAP. Each side does a case in a process of its own. */
#include "connections.h"
#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <regex.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

const struct test *current;
static const struct test *const lists[] = {connection_tests, fault_tests};
static const char *interface, *label = "cm";
static int verdict_pipe; /* from who does a case to who reports it */
static regex_t only[4];
static int only_count;

double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static _Noreturn void die(const char *what)
{
    fprintf(stderr, "connections: %s: %s\n", what, errno ? strerror(errno) : "no");
    exit(1);
}

/* Ends this side of the case. Objects are left to the end of the process. */
void fail(struct session *s, const char *format, ...)
{
    va_list arguments;
    int n = snprintf(s->verdict, sizeof s->verdict, s->active ? "active side: " : "passive side: ");
    va_start(arguments, format);
    vsnprintf(s->verdict + n, sizeof s->verdict - (size_t)n, format, arguments);
    if (write(verdict_pipe, s->verdict, strlen(s->verdict)) < 0)
        perror("connections: verdict");
    _exit(1);
}

/* A line of the TCP connection: a letter, a space, text. What a case does not want stays where it is. */
static bool write_line(int fd, char letter, const char *text)
{
    char line[400];
    int n = snprintf(line, sizeof line, "%c %s\n", letter, text);
    return write(fd, line, (size_t)n) == n;
}

static bool read_line(int fd, char *letter, char *text, size_t room)
{
    char c;
    size_t n = 0;
    for (int at = 0;; at++) {
        ssize_t got = read(fd, &c, 1);
        if (got != 1)
            return false;
        if (c == '\n')
            break;
        if (at == 0)
            *letter = c;
        else if (at > 1 && n < room - 1)
            text[n++] = c;
    }
    text[n] = 0;
    return true;
}

/* Whether the other side's verdict is there, and says that it failed. */
bool peer_gave_up(struct session *s)
{
    char start[3];
    ssize_t n = recv(s->peer, start, sizeof start, MSG_PEEK | MSG_DONTWAIT);
    return n == 0 || (n == 3 && start[0] == 'V' && start[2] != '\n');
}

bool peer_speaks(struct session *s)
{
    char letter;
    return recv(s->peer, &letter, 1, MSG_PEEK | MSG_DONTWAIT) == 1 && letter != 'V';
}

static void from_peer(struct session *s, char wanted, char *text, size_t room)
{
    char letter = 0;
    double end = now() + s->patience;
    while (!peer_speaks(s)) {
        MUST(!peer_gave_up(s), "the other side ends the case");
        MUST(now() < end, "the other side hangs");
        usleep(2000);
    }
    MUST(read_line(s->peer, &letter, text, room) && letter == wanted, "a line %c, not %c, from the other side", letter, wanted);
}

void sync_peer(struct session *s)
{
    char text[8];
    MUST(write_line(s->peer, 'S', ""), "the other side is gone");
    from_peer(s, 'S', text, sizeof text);
}

void tell(struct session *s, uint32_t number)
{
    char text[16];
    snprintf(text, sizeof text, "%u", number);
    MUST(write_line(s->peer, 'N', text), "the other side is gone");
}

uint32_t hear(struct session *s)
{
    char text[16];
    from_peer(s, 'N', text, sizeof text);
    return (uint32_t)strtoul(text, NULL, 10);
}

static void address(struct sockaddr_storage *at, const char *text)
{
    struct sockaddr_in *four = (void *)at;
    struct sockaddr_in6 *six = (void *)at;
    memset(at, 0, sizeof *at);
    if (inet_pton(AF_INET, text, &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
    } else if (inet_pton(AF_INET6, text, &six->sin6_addr) == 1) {
        six->sin6_family = AF_INET6;
        if (IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr))
            six->sin6_scope_id = if_nametoindex(interface);
    } else {
        die(text);
    }
}

/* Does one side of a case, in a new process, and tells the other how it ended: "" when all was well. */
static void do_case(int peer, const struct test *test, bool active, int patience, const char *from, const char *to, char *verdict, size_t room)
{
    int ends[2], status;
    if (pipe(ends))
        die("pipe");
    pid_t child = fork();
    if (child < 0)
        die("fork");
    if (!child) {
        struct session session = {.peer = peer, .active = active, .patience = patience, .space = RDMA_PS_TCP}, *s = &session;
        close(ends[0]);
        verdict_pipe = ends[1];
        address(&s->from, from);
        address(&s->to, to);
        current = test;
        alarm((unsigned)(3 * patience));
        (active ? test->active : test->passive)(s);
        close_all(s);
        _exit(0);
    }
    close(ends[1]);
    size_t length = 0;
    ssize_t n;
    while ((n = read(ends[0], verdict + length, room - 1 - length)) > 0)
        length += (size_t)n;
    verdict[length] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    bool dies = test->deadly && test->who_dies == active;
    if (WIFSIGNALED(status) && !(dies && WTERMSIG(status) == SIGKILL))
        snprintf(verdict, room, "%s side: ends by signal %d", active ? "active" : "passive", WTERMSIG(status));
    else if (!length && WIFEXITED(status) && (WEXITSTATUS(status) || dies))
        snprintf(verdict, room, "%s side: ends with status %d", active ? "active" : "passive", WEXITSTATUS(status));
    if (!write_line(peer, 'V', verdict))
        die("the verdict");
}

static const struct test *test_of(const char *name)
{
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (const struct test *test = lists[i]; test->name; test++)
            if (!strcmp(test->name, name))
                return test;
    return NULL;
}

/* The server's side of a connection, in a process of its own. */
static void serve(int fd)
{
    char letter, text[400], name[100], from[100], to[100], verdict[400];
    int active, patience;
    signal(SIGCHLD, SIG_DFL);
    while (read_line(fd, &letter, text, sizeof text)) {
        if (letter != 'C')
            continue; /* left of a case that one side gave up */
        const struct test *test = NULL;
        if (sscanf(text, "%99s %d %d %99s %99s", name, &active, &patience, from, to) != 5 || !(test = test_of(name))) {
            write_line(fd, 'V', "no such case");
            continue;
        }
        do_case(fd, test, active, patience, from, to, verdict, sizeof verdict);
    }
    exit(0);
}

static void server(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 64))
        die("listen");
    signal(SIGCHLD, SIG_IGN);
    puts("LISTENS");
    fflush(stdout);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            continue;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (fork() == 0) {
            close(listener);
            serve(fd);
        }
        close(fd);
    }
}

static int connect_to(const char *text, int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    inet_pton(AF_INET, text, &to.sin_addr);
    if (connect(fd, (void *)&to, sizeof to))
        die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static bool selected(const char *name, bool out)
{
    char full[200];
    snprintf(full, sizeof full, "%s/%s/%s", label, name, out ? "out" : "in");
    for (int i = 0; i < only_count; i++)
        if (regexec(&only[i], full, 0, NULL, 0))
            return false;
    return true;
}

/* The case, by both sides. False: the server is gone. */
static bool client_case(int fd, const struct test *test, bool out, int patience, const char *ours, const char *theirs)
{
    char order[400], mine[400], letter = 0, verdict[400] = "";
    const char *from = out ? ours : theirs, *to = out ? theirs : ours;
    snprintf(order, sizeof order, "%s %d %d %s %s", test->name, !out, patience, from, to);
    write_line(fd, 'C', order);
    do_case(fd, test, out, patience, from, to, mine, sizeof mine);
    while (letter != 'V')
        if (!read_line(fd, &letter, verdict, sizeof verdict)) {
            printf("not ok %s/%s/%s: the server is gone; %s\n", label, test->name, out ? "out" : "in", mine);
            return false;
        }
    if (!*mine && !*verdict)
        printf("ok %s/%s/%s\n", label, test->name, out ? "out" : "in");
    else
        printf("not ok %s/%s/%s: %s%s%s\n", label, test->name, out ? "out" : "in", mine, *mine && *verdict ? "; " : "", verdict);
    fflush(stdout);
    return true;
}

int main(int count, char **words)
{
    const char *peer = NULL, *ours = NULL, *theirs = NULL;
    int port = 0, patience = 20, option;
    while ((option = getopt(count, words, "i:p:c:a:b:t:l:o:")) >= 0)
        switch (option) {
        case 'i': interface = optarg; break;
        case 'p': port = atoi(optarg); break;
        case 'c': peer = optarg; break;
        case 'a': ours = optarg; break;
        case 'b': theirs = optarg; break;
        case 't': patience = atoi(optarg); break;
        case 'l': label = optarg; break;
        case 'o':
            if (only_count == 4 || regcomp(&only[only_count++], optarg, REG_EXTENDED | REG_NOSUB))
                die("a regex");
            break;
        default: return 2;
        }
    if (!port || !interface || (peer && (!ours || !theirs)))
        return 2;
    signal(SIGPIPE, SIG_IGN);
    if (!peer)
        server(port);
    int fd = connect_to(peer, port);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (const struct test *test = lists[i]; test->name; test++)
            for (int out = 1; out >= 0; out--)
                if (selected(test->name, out) && !client_case(fd, test, out, patience, ours, theirs))
                    return 1;
    return 0;
}
