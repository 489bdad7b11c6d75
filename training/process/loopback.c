/* Preloaded into mpirun by a launch on one machine: binds sockets to loopback instead of all interfaces. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

typedef int (*bind_function)(int, const struct sockaddr *, socklen_t);

int bind(int descriptor, const struct sockaddr *address, socklen_t length)
{
    bind_function next = (bind_function) dlsym(RTLD_NEXT, "bind");
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;

    if (address != NULL && address->sa_family == AF_INET && length >= sizeof v4) {
        memcpy(&v4, address, sizeof v4);
        if (v4.sin_addr.s_addr == htonl(INADDR_ANY)) {
            v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            return next(descriptor, (const struct sockaddr *) &v4, sizeof v4);
        }
    }
    if (address != NULL && address->sa_family == AF_INET6 && length >= sizeof v6) {
        memcpy(&v6, address, sizeof v6);
        if (IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr)) {
            v6.sin6_addr = in6addr_loopback;
            return next(descriptor, (const struct sockaddr *) &v6, sizeof v6);
        }
    }
    return next(descriptor, address, length);
}
