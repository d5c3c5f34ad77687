/* A library that brings verbs with it, as plug-ins do: loaded and unloaded by reloaded.c. */
#include "verbs_pair.h"

#define LENGTH 5000

/* One transfer; with leave != 0 it destroys nothing. */
void plugin_run(int leave)
{
    static unsigned char from[LENGTH], to[LENGTH];
    struct side pair[2];
    make_pair(pair);
    struct ibv_mr *from_mr = reg(&pair[0], from, LENGTH), *to_mr = reg(&pair[1], to, LENGTH);
    transfer(pair, from, from_mr, to, to_mr, LENGTH, 9);
    if (leave)
        return;
    ibv_dereg_mr(from_mr);
    ibv_dereg_mr(to_mr);
    destroy_pair(pair);
}
