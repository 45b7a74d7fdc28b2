/* Interposed by LD_PRELOAD before libc's calls on files and sockets: lets the n-th one fail, fall short, be late or
 * kill, and logs them; and before those on the clock, to which it adds FAULTS_CLOCK seconds. Process ids of several
 * machines in one log are told apart by FAULTS_MACHINE, from 0: see begin().
 *
 * Every process that inherits the environment maps the file FAULTS_CONTROL, a struct control, which the program that
 * directs them arms and reads; FAULTS_DATA, if set, is a file that takes the bytes that are written. A call is looked
 * at if it is about a file below one of the scopes, or about a socket, a memfd or a pipe where these are asked for.
 * Its site are the two innermost lines of Python within the package: `a/b.py:12 function < a/c.py:34 caller`.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

#undef open
#undef openat

enum kind { OPEN, READ, WRITE, FSYNC, MMAP, RENAME, UNLINK, MKDIR, ALLOCATE, TRUNCATE, SENDMSG, RECVMSG, MUNMAP, BEGIN_FSYNC };
enum mode { OFF, FAIL, SHORT, KILL, DELAY };
enum target { FILES = 1, SOCKETS = 2, MEMFDS = 4, PIPES = 8 };
enum { PATH_BYTES = 256, SITE_BYTES = 160, PLACE_BYTES = 78, SCOPES = 4, EXEMPT = 8, RECORDS = 1 << 16, PATIENCE = 1 << 22, PID_BITS = 22, RESERVED = 1 << 16 };

struct record {
    int32_t kind, pid;
    int64_t inode, offset, length, data; /* data: place in FAULTS_DATA, -1 if not kept */
    int64_t result;
    int32_t code, flags; /* flags: of open; 1 where the call has created the file or replaced a name */
    char path[PATH_BYTES], other[PATH_BYTES], site[SITE_BYTES];
};

struct control {
    int32_t mode, code, sticky, targets;
    uint32_t kinds;
    int32_t logging, keeping_data, want_sites;
    int64_t nth, count, fired;
    int32_t exempt[EXEMPT];
    char scopes[SCOPES][PATH_BYTES];
    char site[SITE_BYTES];       /* only calls whose site is this */
    char fired_site[SITE_BYTES]; /* of the first fault, with the kind before it */
    char fired_path[PATH_BYTES];
    int32_t fired_pid, fired_kind, order, pad;
    int64_t records, data_used, data_size;
    struct record log[RECORDS];
};

static struct control *control;
static double clock_ahead; /* seconds */
static int machine;        /* added to process ids that are logged */
static char *data_area;
static __thread int inside;

static const char *const NAMES[] = {"open",  "read",     "write",    "fsync",   "mmap",    "rename", "unlink",
                                    "mkdir", "allocate", "truncate", "sendmsg", "recvmsg", "munmap", "begin fsync"};


static void *mapped(const char *variable, size_t size) {
    const char *path = getenv(variable);
    if (!path) return NULL;
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return NULL;
    void *area = (void *)syscall(SYS_mmap, NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    return area == MAP_FAILED ? NULL : area;
}

__attribute__((constructor)) static void begin(void) {
    const char *ahead = getenv("FAULTS_CLOCK");
    const char *number = getenv("FAULTS_MACHINE");
    if (ahead) clock_ahead = atof(ahead);
    if (number) machine = atoi(number) << PID_BITS;
    control = mapped("FAULTS_CONTROL", sizeof(struct control));
    if (control && control->data_size) data_area = mapped("FAULTS_DATA", control->data_size);
}

/* --- the line of Python that a call comes from ------------------------------------------------------------------- */

static struct {
    int known;
    int (*initialized)(void);
    void *(*own_state)(void);
    int (*ensure)(void);
    void (*let_go)(int);
    void *(*frame)(void);
    void *(*code)(void *);
    void *(*back)(void *);
    int (*line)(void *);
    void *(*attribute)(void *, const char *);
    const char *(*text)(void *);
    void (*decref)(void *);
    void (*incref)(void *);
    void *(*occurred)(void);
} py;

static void find_python(void) {
    py.initialized = dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    py.own_state = dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    py.ensure = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    py.let_go = dlsym(RTLD_DEFAULT, "PyGILState_Release");
    py.frame = dlsym(RTLD_DEFAULT, "PyEval_GetFrame");
    py.code = dlsym(RTLD_DEFAULT, "PyFrame_GetCode");
    py.back = dlsym(RTLD_DEFAULT, "PyFrame_GetBack");
    py.line = dlsym(RTLD_DEFAULT, "PyFrame_GetLineNumber");
    py.attribute = dlsym(RTLD_DEFAULT, "PyObject_GetAttrString");
    py.text = dlsym(RTLD_DEFAULT, "PyUnicode_AsUTF8");
    py.decref = dlsym(RTLD_DEFAULT, "Py_DecRef");
    py.incref = dlsym(RTLD_DEFAULT, "Py_IncRef");
    py.occurred = dlsym(RTLD_DEFAULT, "PyErr_Occurred");
    py.known = py.initialized && py.own_state && py.frame && py.back && py.occurred ? 1 : -1;
}

/* Writes the frame's place; returns whether it lies in the package. */
static int describe(void *frame, char *site) {
    int ours = 0;
    void *code = py.code(frame), *file = py.attribute(code, "co_filename"), *name = py.attribute(code, "co_name");
    const char *path = file ? py.text(file) : NULL, *function = name ? py.text(name) : NULL;
    if (path && function) {
        const char *inside_package = strstr(path, "/modelexport/");
        const char *last = strrchr(path, '/');
        ours = inside_package != NULL && !strstr(path, "/tests/");
        if (ours) path = inside_package + sizeof "/modelexport/" - 1;
        snprintf(site, PLACE_BYTES, "%s:%d %s", ours ? path : last ? last + 1 : path, py.line(frame), function);
    }
    if (file) py.decref(file);
    if (name) py.decref(name);
    py.decref(code);
    return ours;
}

static void python_site(char *site) {
    snprintf(site, SITE_BYTES, "native");
    if (!py.known) find_python();
    if (py.known < 0 || !py.initialized() || !py.own_state()) return; /* a thread that Python does not know */
    int state = py.ensure();
    void *frame = py.occurred() ? NULL : py.frame();
    if (frame) {
        char place[PLACE_BYTES];
        int found = 0;
        py.incref(frame);
        for (int first = 1; frame; first = 0) {
            int ours = describe(frame, place);
            if ((ours || first) && !found) snprintf(site, SITE_BYTES, "%s", place);
            if (ours && found) snprintf(site + strlen(site), SITE_BYTES - strlen(site), " < %s", place);
            found += ours;
            void *back = found < 2 ? py.back(frame) : NULL;
            py.decref(frame);
            frame = back;
        }
    }
    py.let_go(state);
}

/* --- which calls are looked at ----------------------------------------------------------------------------------- */

static int in_scope(const char *path) {
    if (!path[0]) return 0;
    if (path[0] != '/') return 0;
    if (!strncmp(path, "/memfd:", 7)) return control->targets & MEMFDS;
    if (!(control->targets & FILES)) return 0;
    for (int i = 0; i < SCOPES; i++) {
        size_t length = strlen(control->scopes[i]);
        if (length && !strncmp(path, control->scopes[i], length) && (path[length] == '/' || !path[length])) return 1;
    }
    return 0;
}

static int path_of_fd(int fd, char *path) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_BYTES - 1);
    path[length > 0 ? length : 0] = 0;
    return length > 0;
}

static void absolute(int directory, const char *name, char *path) {
    char base[PATH_BYTES] = "";
    path[0] = 0;
    if (!name) return;
    if (name[0] == '/') {
        snprintf(path, PATH_BYTES, "%s", name);
        return;
    }
    if (directory == AT_FDCWD) {
        if (syscall(SYS_getcwd, base, sizeof base) < 0) return;
    } else if (!path_of_fd(directory, base)) {
        return;
    }
    if (strlen(base) + strlen(name) + 2 < PATH_BYTES) sprintf(path, "%s/%s", base, name);
}

static int is_watched(int kind) {
    if (!control || inside || !(control->logging || control->mode)) return 0;
    if (!control->logging && !(control->kinds >> kind & 1)) return 0;
    int pid = getpid();
    for (int i = 0; i < EXEMPT; i++)
        if (control->exempt[i] == pid) return 0;
    return 1;
}

/* Memory that is there already: a read or write of it does not fail, nor fall short. */
static int is_reserved(int kind, int fd, const char *path) {
    struct stat status;
    if ((kind != READ && kind != WRITE) || strncmp(path, "/memfd:", 7) || syscall(SYS_fstat, fd, &status)) return 0;
    return status.st_blocks * 512 >= status.st_size + RESERVED;
}

static int fd_in_scope(int kind, int fd, char *path) {
    if (!path_of_fd(fd, path) || is_reserved(kind, fd, path)) return 0;
    if (!strncmp(path, "socket:", 7)) return control->targets & SOCKETS;
    if (!strncmp(path, "pipe:", 5)) return control->targets & PIPES;
    return in_scope(path);
}

struct call {
    int kind, verdict;
    char path[PATH_BYTES], other[PATH_BYTES], site[SITE_BYTES];
};

/* Decides about a call that is in scope: OFF, FAIL (errno is set) or SHORT. May not return. */
static int decide(struct call *call) {
    int code = errno;
    call->site[0] = 0;
    if (control->want_sites || control->site[0]) python_site(call->site);
    errno = code;
    if (!control->mode || !(control->kinds >> call->kind & 1)) return OFF;
    if (control->site[0] && strcmp(control->site, call->site)) return OFF;
    int64_t number = __atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST);
    if (number < control->nth || (number > control->nth && !control->sticky)) return OFF;
    if (__atomic_add_fetch(&control->fired, 1, __ATOMIC_SEQ_CST) == 1) {
        if (!call->site[0]) python_site(call->site);
        snprintf(control->fired_site, SITE_BYTES, "%s %.145s", NAMES[call->kind], call->site);
        snprintf(control->fired_path, PATH_BYTES, "%s", call->path);
        control->fired_pid = getpid();
        control->fired_kind = call->kind;
    }
    if (control->mode == KILL) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    if (control->mode == DELAY) {
        usleep(control->code);
        errno = code;
        return OFF;
    }
    if (control->mode == FAIL) errno = control->code;
    return control->mode;
}

static struct record *noted(const struct call *call, int64_t result) {
    if (!control->logging) return NULL;
    int64_t number = __atomic_fetch_add(&control->records, 1, __ATOMIC_SEQ_CST);
    if (number >= RECORDS) return NULL;
    struct record *record = &control->log[number];
    record->pid = getpid() + machine;
    record->kind = call->kind;
    record->data = -1;
    record->result = result;
    record->code = result < 0 ? errno : 0;
    memcpy(record->path, call->path, PATH_BYTES);
    memcpy(record->other, call->other, PATH_BYTES);
    memcpy(record->site, call->site, SITE_BYTES);
    return record;
}

/* Calls that change files or names, of all processes, one after the other while their bytes are kept: the log has them
 * in the order in which they were done. (The owner may have been killed: then it is taken from it in the end.) */
static int in_order(void) {
    if (!control->logging || !control->keeping_data) return 0;
    int32_t nobody = 0;
    for (int i = 0; i < PATIENCE; i++, nobody = 0) {
        if (__atomic_compare_exchange_n(&control->order, &nobody, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) break;
        sched_yield();
    }
    return 1;
}

static void ended(int ordered) {
    if (ordered) __atomic_store_n(&control->order, 0, __ATOMIC_SEQ_CST);
    inside--;
}

static int64_t inode_of_fd(int fd) {
    struct stat status;
    return syscall(SYS_fstat, fd, &status) ? -1 : (int64_t)status.st_ino;
}

static int64_t inode_of_path(const char *path) {
    struct stat status;
    return syscall(SYS_newfstatat, AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) ? -1 : (int64_t)status.st_ino;
}

static void keep(struct record *record, const void *bytes, int64_t length) {
    if (!record || !data_area || !control->keeping_data || length <= 0) return;
    int64_t at = __atomic_fetch_add(&control->data_used, length, __ATOMIC_SEQ_CST);
    if (at + length > control->data_size) return;
    memcpy(data_area + at, bytes, length);
    record->data = at;
}

/* Begins a call on a descriptor or a path; returns whether it is in scope. */
static int began_fd(struct call *call, int kind, int fd) {
    int code = errno;
    call->kind = kind;
    call->verdict = OFF;
    call->other[0] = 0;
    if (!is_watched(kind)) return 0;
    inside++;
    int found = fd_in_scope(kind, fd, call->path);
    errno = code;
    if (found) call->verdict = decide(call);
    if (!found) inside--;
    return found;
}

static int began_path(struct call *call, int kind, int directory, const char *name, int other_directory, const char *other) {
    int code = errno;
    call->kind = kind;
    call->verdict = OFF;
    call->other[0] = 0;
    if (!is_watched(kind)) return 0;
    inside++;
    absolute(directory, name, call->path);
    if (other) absolute(other_directory, other, call->other);
    int found = in_scope(call->path) || in_scope(call->other);
    errno = code;
    if (found) call->verdict = decide(call);
    if (!found) inside--;
    return found;
}

/* --- names ------------------------------------------------------------------------------------------------------- */

static int opened(int directory, const char *name, int flags, mode_t mode) {
    struct call call;
    if (!began_path(&call, OPEN, directory, name, 0, NULL)) return syscall(SYS_openat, directory, name, flags, mode);
    int fd = -1, fresh = 0, ordered = flags & (O_CREAT | O_TRUNC) ? in_order() : 0;
    if (call.verdict != FAIL) {
        int64_t before = (flags & O_CREAT) ? inode_of_path(call.path) : 0;
        fd = syscall(SYS_openat, directory, name, flags, mode);
        fresh = fd >= 0 && (flags & O_CREAT) && before < 0;
    }
    int code = errno;
    struct record *record = noted(&call, fd);
    if (record) {
        record->flags = flags & ~1;
        record->flags |= fresh;
        record->inode = fd >= 0 ? inode_of_fd(fd) : -1;
    }
    errno = code;
    ended(ordered);
    return fd;
}

#define MODE_ARGUMENT(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list list; \
        va_start(list, flags); \
        mode = va_arg(list, int); \
        va_end(list); \
    }

int open(const char *name, int flags, ...) { MODE_ARGUMENT(flags) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE_ARGUMENT(flags) return opened(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int openat(int at, const char *name, int flags, ...) { MODE_ARGUMENT(flags) return opened(at, name, flags, mode); }
int openat64(int at, const char *name, int flags, ...) { MODE_ARGUMENT(flags) return opened(at, name, flags | O_LARGEFILE, mode); }
int creat(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return creat(name, mode); }
int __open_2(const char *name, int flags) { return opened(AT_FDCWD, name, flags, 0); }
int __open64_2(const char *name, int flags) { return opened(AT_FDCWD, name, flags, 0); }

int memfd_create(const char *name, unsigned int flags) {
    struct call call;
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "/memfd:%s", name);
    if (!began_path(&call, OPEN, AT_FDCWD, path, 0, NULL)) return syscall(SYS_memfd_create, name, flags);
    int fails = call.verdict == FAIL && errno != EINTR; /* which it never ends with */
    int fd = fails ? -1 : (int)syscall(SYS_memfd_create, name, flags);
    noted(&call, fd);
    ended(0);
    return fd;
}

static int renamed(int from, const char *a, int to, const char *b, unsigned int flags) {
    struct call call;
    if (!began_path(&call, RENAME, from, a, to, b)) return syscall(SYS_renameat2, from, a, to, b, flags);
    int ordered = in_order();
    int64_t inode = inode_of_path(call.path);
    int result = call.verdict == FAIL ? -1 : (int)syscall(SYS_renameat2, from, a, to, b, flags);
    int code = errno;
    struct record *record = noted(&call, result);
    if (record) record->inode = inode, record->flags = (int)flags;
    errno = code;
    ended(ordered);
    return result;
}

int rename(const char *a, const char *b) { return renamed(AT_FDCWD, a, AT_FDCWD, b, 0); }
int renameat(int from, const char *a, int to, const char *b) { return renamed(from, a, to, b, 0); }
int renameat2(int from, const char *a, int to, const char *b, unsigned int flags) { return renamed(from, a, to, b, flags); }

static int unlinked(int at, const char *name, int flags) {
    struct call call;
    if (!began_path(&call, UNLINK, at, name, 0, NULL)) return syscall(SYS_unlinkat, at, name, flags);
    int ordered = in_order();
    int64_t inode = inode_of_path(call.path);
    int result = call.verdict == FAIL ? -1 : (int)syscall(SYS_unlinkat, at, name, flags);
    int code = errno;
    struct record *record = noted(&call, result);
    if (record) record->inode = inode, record->flags = flags;
    errno = code;
    ended(ordered);
    return result;
}

int unlink(const char *name) { return unlinked(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinked(AT_FDCWD, name, AT_REMOVEDIR); }
int unlinkat(int at, const char *name, int flags) { return unlinked(at, name, flags); }

int mkdirat(int at, const char *name, mode_t mode) {
    struct call call;
    if (!began_path(&call, MKDIR, at, name, 0, NULL)) return syscall(SYS_mkdirat, at, name, mode);
    int ordered = in_order();
    int result = call.verdict == FAIL ? -1 : (int)syscall(SYS_mkdirat, at, name, mode);
    int code = errno;
    struct record *record = noted(&call, result);
    if (record) record->inode = inode_of_path(call.path);
    errno = code;
    ended(ordered);
    return result;
}

int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

/* --- bytes ------------------------------------------------------------------------------------------------------- */

/* At most half of what a vector holds, in its first part that holds anything. */
static struct iovec half(const struct iovec *vector, int count) {
    struct iovec part = {NULL, 0};
    for (int i = 0; i < count && !part.iov_len; i++) part = vector[i];
    part.iov_len = part.iov_len > 1 ? part.iov_len / 2 : part.iov_len;
    return part;
}

static ssize_t received(int fd, const struct iovec *vector, int count, off_t offset, int flags) {
    struct call call;
    struct iovec part;
    if (began_fd(&call, READ, fd)) {
        if (call.verdict == FAIL) {
            noted(&call, -1);
            ended(0);
            return -1;
        }
        if (call.verdict == SHORT) part = half(vector, count), vector = &part, count = 1;
        if (control->logging) noted(&call, 0);
        ended(0);
    }
    if (offset < 0 && count == 1) return syscall(SYS_read, fd, vector->iov_base, vector->iov_len);
    if (offset < 0) return syscall(SYS_readv, fd, vector, count);
    return syscall(SYS_preadv2, fd, vector, count, (long)offset, 0L, flags);
}

ssize_t read(int fd, void *buffer, size_t length) {
    if (!control || inside) return syscall(SYS_read, fd, buffer, length);
    struct iovec one = {buffer, length};
    return received(fd, &one, 1, -1, 0);
}
ssize_t __read_chk(int fd, void *buffer, size_t length, size_t room) { return (void)room, read(fd, buffer, length); }
ssize_t readv(int fd, const struct iovec *vector, int count) { return received(fd, vector, count, -1, 0); }
ssize_t pread64(int fd, void *buffer, size_t length, off_t offset) {
    struct iovec one = {buffer, length};
    return received(fd, &one, 1, offset, 0);
}
ssize_t pread(int fd, void *buffer, size_t length, off_t offset) { return pread64(fd, buffer, length, offset); }
ssize_t __pread64_chk(int fd, void *buffer, size_t length, off_t offset, size_t room) {
    return (void)room, pread64(fd, buffer, length, offset);
}
ssize_t preadv(int fd, const struct iovec *v, int n, off_t offset) { return received(fd, v, n, offset, 0); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off_t offset) { return received(fd, v, n, offset, 0); }
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t offset, int flags) { return received(fd, v, n, offset, flags); }
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off_t offset, int flags) { return received(fd, v, n, offset, flags); }

static ssize_t wrote(int fd, const struct iovec *vector, int count, off_t offset, int flags) {
    struct call call;
    struct iovec part;
    int watched = began_fd(&call, WRITE, fd);
    if (watched && call.verdict == FAIL) {
        noted(&call, -1);
        ended(0);
        return -1;
    }
    if (watched && call.verdict == SHORT) part = half(vector, count), vector = &part, count = 1;
    int ordered = watched ? in_order() : 0;
    ssize_t done = offset >= 0  ? syscall(SYS_pwritev2, fd, vector, count, (long)offset, 0L, flags)
                   : count == 1 ? syscall(SYS_write, fd, vector->iov_base, vector->iov_len)
                                : syscall(SYS_writev, fd, vector, count);
    if (!watched) return done;
    int code = errno;
    if (done > 0) {
        off_t at = offset < 0 ? syscall(SYS_lseek, fd, 0L, SEEK_CUR) - done : offset;
        ssize_t left = done;
        for (int i = 0; i < count && left > 0; i++) {
            ssize_t here = (ssize_t)vector[i].iov_len < left ? (ssize_t)vector[i].iov_len : left;
            struct record *record = noted(&call, here);
            if (record) {
                record->inode = inode_of_fd(fd), record->offset = at, record->length = here;
                keep(record, vector[i].iov_base, here);
            }
            at += here;
            left -= here;
        }
    }
    errno = code;
    ended(ordered);
    return done;
}

ssize_t write(int fd, const void *buffer, size_t length) {
    if (!control || inside) return syscall(SYS_write, fd, buffer, length);
    struct iovec one = {(void *)buffer, length};
    return wrote(fd, &one, 1, -1, 0);
}
ssize_t writev(int fd, const struct iovec *vector, int count) { return wrote(fd, vector, count, -1, 0); }
ssize_t pwrite64(int fd, const void *buffer, size_t length, off_t offset) {
    struct iovec one = {(void *)buffer, length};
    return wrote(fd, &one, 1, offset, 0);
}
ssize_t pwrite(int fd, const void *buffer, size_t length, off_t offset) { return pwrite64(fd, buffer, length, offset); }
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t offset) { return wrote(fd, v, n, offset, 0); }
ssize_t pwritev64(int fd, const struct iovec *v, int n, off_t offset) { return wrote(fd, v, n, offset, 0); }
ssize_t pwritev2(int fd, const struct iovec *v, int n, off_t offset, int flags) { return wrote(fd, v, n, offset, flags); }

/* Copies within the kernel are made through memory, so that what is written is known. */
ssize_t sendfile64(int out, int in, off_t *offset, size_t length) {
    struct call call;
    int watched = began_fd(&call, WRITE, out);
    if (!watched) return syscall(SYS_sendfile, out, in, offset, length);
    ended(0);
    if (call.verdict == FAIL) return -1;
    static __thread char buffer[1 << 16];
    if (length > sizeof buffer) length = sizeof buffer;
    if (call.verdict == SHORT && length > 1) length = 1000;
    ssize_t got = offset ? pread64(in, buffer, length, *offset) : read(in, buffer, length);
    if (got <= 0) return got;
    int mode = control->mode;
    if (call.verdict == SHORT) control->mode = OFF;
    ssize_t done = write(out, buffer, got);
    control->mode = mode;
    if (offset && done > 0) *offset += done;
    return done;
}
ssize_t sendfile(int out, int in, off_t *offset, size_t length) { return sendfile64(out, in, offset, length); }

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t length, unsigned int flags) {
    struct call call;
    if (began_fd(&call, WRITE, out)) {
        ended(0);
        errno = EXDEV; /* its callers have another way then, which is seen */
        return -1;
    }
    return syscall(SYS_copy_file_range, in, from, out, to, length, flags);
}

static int synced(int number, int fd) {
    struct call call;
    if (!began_fd(&call, FSYNC, fd)) return syscall(number, fd);
    if (control->logging) {
        call.kind = BEGIN_FSYNC;
        struct record *record = noted(&call, 0);
        if (record) record->inode = inode_of_fd(fd);
        call.kind = FSYNC;
    }
    int result = call.verdict == FAIL ? -1 : (int)syscall(number, fd);
    int code = errno;
    struct record *record = noted(&call, result);
    if (record) record->inode = inode_of_fd(fd);
    errno = code;
    ended(0);
    return result;
}
int fsync(int fd) { return synced(SYS_fsync, fd); }
int fdatasync(int fd) { return synced(SYS_fdatasync, fd); }

static int sized(int kind, int fd, off_t offset, off_t size, int flags) {
    struct call call;
    int watched = began_fd(&call, kind, fd);
    int result = -1, ordered = watched ? in_order() : 0;
    if (call.verdict != FAIL)
        result = kind == TRUNCATE ? syscall(SYS_ftruncate, fd, size) : syscall(SYS_fallocate, fd, flags, offset, size);
    if (!watched) return result;
    int code = errno;
    struct record *record = noted(&call, result);
    if (record) record->inode = inode_of_fd(fd), record->offset = offset, record->length = size, record->flags = flags;
    errno = code;
    ended(ordered);
    return result;
}
int ftruncate(int fd, off_t size) { return sized(TRUNCATE, fd, 0, size, 0); }
int ftruncate64(int fd, off_t size) { return sized(TRUNCATE, fd, 0, size, 0); }
int fallocate(int fd, int mode, off_t offset, off_t size) { return sized(ALLOCATE, fd, offset, size, mode); }
int fallocate64(int fd, int mode, off_t offset, off_t size) { return sized(ALLOCATE, fd, offset, size, mode); }
int posix_fallocate(int fd, off_t offset, off_t size) { return sized(ALLOCATE, fd, offset, size, 0) ? errno : 0; }
int posix_fallocate64(int fd, off_t offset, off_t size) { return sized(ALLOCATE, fd, offset, size, 0) ? errno : 0; }

int truncate(const char *name, off_t size) {
    struct call call;
    if (!began_path(&call, TRUNCATE, AT_FDCWD, name, 0, NULL)) return syscall(SYS_truncate, name, size);
    int ordered = in_order();
    int result = call.verdict == FAIL ? -1 : (int)syscall(SYS_truncate, name, size);
    int code = errno;
    struct record *record = noted(&call, result);
    if (record) record->inode = inode_of_path(call.path), record->length = size;
    errno = code;
    ended(ordered);
    return result;
}
int truncate64(const char *name, off_t size) { return truncate(name, size); }

/* --- mappings: what was written through one is what it holds when it is taken down ------------------------------- */

enum { MAPPINGS = 256 };
static struct {
    char *begin;
    size_t length;
    off_t offset;
    int64_t inode;
    char path[PATH_BYTES];
} mappings[MAPPINGS];

void *mmap64(void *wish, size_t length, int protection, int flags, int fd, off_t offset) {
    struct call call;
    if (fd < 0 || !began_fd(&call, MMAP, fd)) return (void *)syscall(SYS_mmap, wish, length, protection, flags, fd, offset);
    void *area = call.verdict == FAIL ? MAP_FAILED : (void *)syscall(SYS_mmap, wish, length, protection, flags, fd, offset);
    int code = errno;
    struct record *record = noted(&call, area == MAP_FAILED ? -1 : 0);
    if (record) {
        record->inode = inode_of_fd(fd), record->offset = offset, record->length = (int64_t)length;
        record->flags = protection & PROT_WRITE && flags & MAP_SHARED;
        if (record->flags && area != MAP_FAILED)
            for (int i = 0; i < MAPPINGS; i++) {
                char *none = NULL;
                if (!__atomic_compare_exchange_n(&mappings[i].begin, &none, (char *)area, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
                    continue;
                mappings[i].length = length, mappings[i].offset = offset, mappings[i].inode = record->inode;
                memcpy(mappings[i].path, call.path, PATH_BYTES);
                break;
            }
    }
    errno = code;
    ended(0);
    return area;
}
void *mmap(void *wish, size_t length, int protection, int flags, int fd, off_t offset) {
    return mmap64(wish, length, protection, flags, fd, offset);
}

int munmap(void *area, size_t length) {
    if (control && control->logging && area)
        for (int i = 0; i < MAPPINGS; i++) {
            if (mappings[i].begin != area) continue;
            struct call call = {.kind = MUNMAP};
            memcpy(call.path, mappings[i].path, PATH_BYTES);
            inside++;
            int ordered = in_order();
            struct record *record = noted(&call, 0);
            if (record) {
                record->inode = mappings[i].inode, record->offset = mappings[i].offset;
                record->length = (int64_t)mappings[i].length;
                keep(record, area, record->length);
            }
            mappings[i].begin = NULL;
            ended(ordered);
            break;
        }
    return syscall(SYS_munmap, area, length);
}

/* --- sockets ----------------------------------------------------------------------------------------------------- */

static int is_stream(int fd) {
    int type = 0;
    socklen_t size = sizeof type;
    return !syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_TYPE, &type, &size) && type == SOCK_STREAM;
}

/* Begins a call on a socket; returns FAIL, SHORT (of a stream only) or OFF. */
static int on_socket(int kind, int fd) {
    struct call call;
    if (!began_fd(&call, kind, fd)) return OFF;
    if (control->logging) noted(&call, call.verdict == FAIL ? -1 : 0);
    ended(0);
    return call.verdict == SHORT && !is_stream(fd) ? OFF : call.verdict;
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    struct msghdr other = *message;
    struct iovec part;
    int verdict = on_socket(SENDMSG, fd);
    if (verdict == FAIL) return -1;
    if (verdict == SHORT && other.msg_iovlen) part = half(other.msg_iov, (int)other.msg_iovlen), other.msg_iov = &part, other.msg_iovlen = 1;
    return syscall(SYS_sendmsg, fd, &other, flags);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    struct iovec part, *vector = message->msg_iov;
    size_t count = message->msg_iovlen;
    int verdict = on_socket(RECVMSG, fd);
    if (verdict == FAIL) return -1;
    if (verdict == SHORT && count && !(flags & MSG_WAITALL))
        part = half(vector, (int)count), message->msg_iov = &part, message->msg_iovlen = 1;
    ssize_t got = syscall(SYS_recvmsg, fd, message, flags);
    message->msg_iov = vector;
    message->msg_iovlen = count;
    return got;
}

ssize_t sendto(int fd, const void *buffer, size_t length, int flags, const struct sockaddr *to, socklen_t size) {
    int verdict = on_socket(SENDMSG, fd);
    if (verdict == FAIL) return -1;
    return syscall(SYS_sendto, fd, buffer, verdict == SHORT && length > 1 ? length / 2 : length, flags, to, size);
}
ssize_t send(int fd, const void *buffer, size_t length, int flags) { return sendto(fd, buffer, length, flags, NULL, 0); }

ssize_t recvfrom(int fd, void *buffer, size_t length, int flags, struct sockaddr *from, socklen_t *size) {
    int verdict = on_socket(RECVMSG, fd);
    if (verdict == FAIL) return -1;
    int less = verdict == SHORT && length > 1 && !(flags & MSG_WAITALL);
    return syscall(SYS_recvfrom, fd, buffer, less ? length / 2 : length, flags, from, size);
}
ssize_t recv(int fd, void *buffer, size_t length, int flags) { return recvfrom(fd, buffer, length, flags, NULL, NULL); }
ssize_t __recv_chk(int fd, void *buffer, size_t length, size_t room, int flags) { return (void)room, recv(fd, buffer, length, flags); }

/* --- the clock ---------------------------------------------------------------------------------------------------- */

int clock_gettime(clockid_t clock, struct timespec *found) {
    long result = syscall(SYS_clock_gettime, clock, found);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) found->tv_sec += (time_t)clock_ahead;
    return (int)result;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *kept) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept) *kept = now.tv_sec;
    return now.tv_sec;
}
