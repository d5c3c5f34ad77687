/* The TCP connection between the two sides of a case: frames with a type and a length. */
#include "ops.h"
#include <errno.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static bool move_all(int fd, void *data, size_t length, bool out)
{
    uint8_t *at = data;
    while (length) {
        ssize_t n = out ? write(fd, at, length) : read(fd, at, length);
        if (n <= 0 && errno != EINTR)
            return false;
        if (n > 0)
            at += n, length -= (size_t)n;
    }
    return true;
}

/* A frame: type, number of the case, length, data. A peer that is gone is noticed by who reads. */
void write_frame(int fd, char type, uint32_t number, const void *data, uint32_t length)
{
    uint8_t frame[9 + ROOM];
    frame[0] = (uint8_t)type;
    memcpy(frame + 1, &number, 4);
    memcpy(frame + 5, &length, 4);
    memcpy(frame + 9, data, length);
    move_all(fd, frame, 9 + length, true);
}

/* False: the connection has ended, or nothing came in time (SO_RCVTIMEO). */
bool read_frame(int fd, struct frame *frame)
{
    uint8_t header[9];
    if (!move_all(fd, header, 9, false))
        return false;
    frame->type = (char)header[0];
    memcpy(&frame->number, header + 1, 4);
    memcpy(&frame->length, header + 5, 4);
    if (frame->length > ROOM || !move_all(fd, frame->data, frame->length, false))
        return false;
    frame->data[frame->length] = 0;
    return true;
}

static void expect_frame(struct session *s, char wanted, void *data, uint32_t length)
{
    struct frame frame;
    do /* what is left of an earlier case, which one side has given up */
        MUST(read_frame(s->peer, &frame), "the other side is gone or hangs");
    while (frame.number != s->number);
    if (frame.type == 'V') {
        snprintf(s->peer_verdict, sizeof s->peer_verdict, "%.290s", (char *)frame.data);
        s->peer_gave_verdict = true;
        fail(s, "the other side ends the case");
    }
    MUST(frame.type == wanted && frame.length == length, "a frame %c of %u bytes, not %c of %u", frame.type, frame.length, wanted, length);
    if (data)
        memcpy(data, frame.data, length);
}

/* Both sides have come here. */
void sync_peer(struct session *s)
{
    write_frame(s->peer, 'S', s->number, "", 0);
    expect_frame(s, 'S', NULL, 0);
}

/* Ends the case if the other side has: what is awaited will not come. */
void notice_end(struct session *s)
{
    char type;
    if (recv(s->peer, &type, 1, MSG_PEEK | MSG_DONTWAIT) == 1 && type == 'V')
        expect_frame(s, 'S', NULL, 0);
}

/* Gives and takes as many bytes. */
void swap(struct session *s, const void *mine, void *theirs, uint32_t length)
{
    write_frame(s->peer, 'D', s->number, mine, length);
    expect_frame(s, 'D', theirs, length);
}
