/* reloaded PLUGIN...: loads libraries that use verbs (RTLD_LOCAL), runs them, unloads them, ten times; the last time all
 * is left open at dlclose and at exit. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    for (int i = 0; i < 10; i++) {
        for (int p = 1; p < argc; p++) {
            void *plugin = dlopen(argv[p], RTLD_NOW | RTLD_LOCAL);
            if (!plugin) {
                fprintf(stderr, "FAILED: %s\n", dlerror());
                return 1;
            }
            void (*run)(int) = (void (*)(int))dlsym(plugin, "plugin_run");
            run(i == 9);
            dlclose(plugin);
        }
    }
    puts("ok");
    return 0;
}
