/* reloaded PLUGIN: loads a library that uses verbs (RTLD_LOCAL), runs it, unloads it, ten times; the last time all is
 * left open at dlclose and at exit. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    for (int i = 0; i < 10 && argc > 1; i++) {
        void *plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
        if (!plugin) {
            fprintf(stderr, "FAILED: %s\n", dlerror());
            return 1;
        }
        void (*run)(int) = (void (*)(int))dlsym(plugin, "plugin_run");
        run(i == 9);
        dlclose(plugin);
    }
    puts("ok");
    return 0;
}
