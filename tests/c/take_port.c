/* take_port: holds UDP port 4791 for itself alone, says "taken", and waits until it is killed. */
#include <arpa/inet.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

int main(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(4791)};
    int s = socket(AF_INET, SOCK_DGRAM, 0);
    if (bind(s, (struct sockaddr *)&address, sizeof(address))) {
        perror("bind");
        return 1;
    }
    puts("taken");
    fflush(stdout);
    pause();
}
