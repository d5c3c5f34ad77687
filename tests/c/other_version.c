/* other_version daemon|client: speaks the hello of ferroced's protocol with a version that does not exist. As the
 * daemon it answers every caller with that, until it is killed; as a client it prints what the daemon says. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static const char hello[] = "FRRC\xff\x7f" "99.0.0"; /* magic, version 32767, release */

int main(int argc, char **argv)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "\0ferroced"};
    socklen_t length = offsetof(struct sockaddr_un, sun_path) + 9;
    char buffer[4096];
    int s = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (argc > 1 && !strcmp(argv[1], "client")) {
        if (connect(s, (struct sockaddr *)&address, length) || send(s, hello, sizeof(hello) - 1, MSG_NOSIGNAL) < 0) {
            perror("connect");
            return 1;
        }
        ssize_t n;
        while ((n = recv(s, buffer, sizeof(buffer), 0)) > 0)
            printf("%zd bytes: %.*s\n", n, (int)n, buffer);
        puts("closed");
        return 0;
    }
    if (bind(s, (struct sockaddr *)&address, length) || listen(s, 8)) {
        perror("bind");
        return 1;
    }
    for (;;) {
        int c = accept(s, NULL, NULL);
        send(c, hello, sizeof(hello) - 1, MSG_NOSIGNAL);
        (void)!recv(c, buffer, sizeof(buffer), 0);
        close(c);
    }
}
