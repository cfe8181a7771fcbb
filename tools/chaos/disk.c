/* Makes writes below a folder fail: loaded before the C library (LD_PRELOAD).
 *
 * FLOWMILL_DISK=short: every third write takes half of what it is given.
 * FLOWMILL_DISK=eio:N, enospc:N: write or fsync number N of a process fails, and every N-th after it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long calls;

static int below(int fd) {
    const char *folder = getenv("FLOWMILL_DISK_BELOW");
    char link[64], path[4096];
    if (folder == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

/* Returns the error of this call, or 0; *half says whether it takes half of its bytes. */
static int fault(int fd, int *half) {
    const char *kind = getenv("FLOWMILL_DISK");
    *half = 0;
    if (kind == NULL || !below(fd)) return 0;
    long number = atomic_fetch_add(&calls, 1) + 1;
    if (strcmp(kind, "short") == 0) {
        *half = number % 3 == 0;
        return 0;
    }
    const char *every = strchr(kind, ':');
    if (every == NULL || number % atol(every + 1) != 0) return 0;
    return strncmp(kind, "eio", 3) == 0 ? EIO : ENOSPC;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    int half, error = fault(fd, &half);
    if (error) { errno = error; return -1; }
    return real(fd, data, half && size > 1 ? size / 2 : size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    int half, error = fault(fd, &half);
    if (error) { errno = error; return -1; }
    return real(fd, data, half && size > 1 ? size / 2 : size, at);
}

int fsync(int fd) {
    REAL(fsync);
    int half, error = fault(fd, &half);
    if (error) { errno = error; return -1; }
    return real(fd);
}
