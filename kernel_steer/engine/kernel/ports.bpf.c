/*
 * Carries steered connections: a client on one side, two nodes (one serves, one stands by) on the other.
 *
 * `steer_port` is attached as SK_SKB_VERDICT without a stream parser and sees every segment of every
 * socket once, whole and in order, under that socket's lock. It redirects the segment to where it belongs,
 * or passes it: then user space, which knows all of HTTP, carries this connection until the next boundary.
 * `watch_port` hangs on the gateway's cgroup, hears when a node's connection ends, and how far a peer has
 * confirmed what it was sent. Invariants:
 *
 *   order      A segment is redirected only while user space has written on all that was passed from its
 *              socket (acked == passed). User space in turn writes to a socket only when TCP has taken all
 *              that was redirected there.
 *   whole      A node is chosen at a request's first byte and kept until its response's last one. Where
 *              these are is counted here, byte by byte, over any segmentation of the bodies.
 *   bound      What was sent to a socket and is not confirmed never exceeds UNCONFIRMED_MAX bytes and
 *              SEGMENTS_MAX segments: redirects know no back-pressure of their own.
 *   state      Framing moves on only together with a redirect. So user space always takes over between two
 *              segments, at a state that it can go on from.
 *   FIN        A segment that carries one is passed. Redirecting the empty segment of a bare FIN would
 *              break the other socket for good.
 *
 * One writer for each word: user space (while `kernel` is 0, or for words named as its own), the client's
 * verdict (request_*, requests, pinned), the nodes' verdicts (response_*, responses).
 *
 * A doubt is always resolved by SK_PASS, never by SK_DROP: dropped bytes are acknowledged and gone.
 * Limits and phases come from ports/layout.py, where the structs are declared again.
 */
#include <uapi/linux/bpf.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the byte patterns below are written for little-endian machines"
#endif

#define CLIENT 3 /* the client's side; its nodes have sides 1 and 2, and 0 is nobody */
#define SIDES 3  /* a mask: the verifier wants to see that a side's number stays inside the array */

struct side {
    u64 cookie;             /* key in `port_socks`; 0: nobody is there */
    u64 node;               /* key in `node` */
    u64 epoch;              /* incarnation of the node */
    u64 acked;              /* of `passed`: bytes that are wholly with the other side's TCP */
    u64 written;            /* bytes that user space wrote to this socket */
    u64 base;               /* TCP's count of confirmed bytes when the socket came here */
    u64 passed;             /* bytes from this socket that were left to user space */
    u64 redirected;         /* bytes sent on to this socket */
    u64 segments;           /* as many segments they were */
    u64 confirmed;          /* of written + redirected: the peer has them */
    u64 confirmed_segments; /* of `segments`, where that is known */
    u64 fin;                /* the peer has closed its half */
    u64 dead;               /* the connection has ended, or its peer closed */
    u64 next_position;      /* TCP sequence number that has to come next */
    u64 positioned;         /* `next_position` is known */
    u64 overlaps;           /* a segment did not begin there: the stream cannot be trusted any more */
};
_Static_assert(sizeof(struct side) == 128, "ports/layout.py declares 16 words");

struct link {
    u64 kernel;         /* 1: segments may be redirected; 0: everything is passed */
    u64 http;           /* 1: requests are framed; 0: bytes are bytes */
    u64 armed;          /* user space sleeps: set there, cleared here when it is woken */
    u64 attention;      /* user space has to do something at the next boundary, or wants another node pinned */
    u64 first;          /* the side of the primary: 1 or 2 */
    u64 idle_ns;        /* without http: a flip waits for so long a silence */
    u64 pinned;         /* the side that serves */
    u64 requests;       /* begun */
    u64 responses;      /* ended: as many as requests, at a boundary */
    u64 request_phase;
    u64 request_left;
    u64 response_phase;
    u64 response_left;
    u64 replay;         /* bytes in `port_replays`, when they are all of the request and it may be sent twice */
    u64 asked_head;     /* the response has no body, whatever it says */
    u64 last_ns;        /* CLOCK_MONOTONIC of the newest byte in either direction */
    u64 moved;          /* requests (or idle flips) that went elsewhere than to the one before */
    u64 unused[7];
    struct side side[4];
};
_Static_assert(sizeof(struct link) == 704, "ports/layout.py declares 24 + 4 * 16 words");

/* A message's head, looked at before it is redirected. */
struct head {
    u8 data[HEAD_MAX];
    u8 slack[64]; /* patterns are read past the end; what they find there is never counted */
    /* In memory while they are worked with: the verifier would follow each value of a register. */
    volatile u32 end;    /* where the body begins; 0: not in this segment */
    volatile u32 line;   /* of the LF that ends the first line */
    volatile u32 odd;    /* lines that user space has to understand */
    volatile u32 lengths, length_at;
    volatile u32 transfers, transfer_at;
    volatile u32 connections, connection_at;
    volatile u32 length;
};

/* A request that may be sent again. */
struct replay {
    u8 data[HEAD_MAX];
};

/* What is thought about one segment. In memory for the same reason. */
struct work {
    volatile u64 number; /* the side that it comes from */
    volatile u64 at;     /* how far in the segment its message is understood */
    volatile u64 phase;
    volatile u64 left;
    volatile u64 target;
    volatile u64 opaque; /* bytes are bytes */
    volatile u64 begins; /* a request does, or an idle connection moves */
    volatile u64 replay;
    volatile u64 asked_head;
};

/* All sockets, by cookie: sources under the program's verdict, and its targets. */
BPF_SOCKHASH(port_socks, u64, ENDS);
/* Cookie -> slot in `port_links` * 4 + side. */
BPF_TABLE("hash", u64, u64, port_ends, ENDS);
/* State of the connections; mapped into the gateway's memory. */
BPF_F_TABLE("array", u32, struct link, port_links, LINKS, BPF_F_MMAPABLE);
/* The newest request of each connection, when it may be sent twice; mapped likewise. */
BPF_F_TABLE("array", u32, struct replay, port_replays, LINKS, BPF_F_MMAPABLE);
/* Local TCP ports that `watch_port` cares for. */
BPF_TABLE("hash", u32, u32, port_numbers, PORTS);
/* Digest of a node's name -> its first epoch that is not flipped away. The map of steer.bpf.c: one write flips
 * the answers of the API door and the steered connections. */
BPF_TABLE("hash", u64, u64, node, NODES);
/* Slots whose user space should wake up, at most one entry per sleeper. */
BPF_RINGBUF_OUTPUT(port_events, 1);
/* Space of the running CPU: a head does not fit on a BPF stack. */
BPF_PERCPU_ARRAY(port_head, struct head, 1);
BPF_PERCPU_ARRAY(port_work, struct work, 1);

/* Eight bytes of text as they stand in memory. */
#define WORD(a, b, c, d, e, f, g, h)                                                                     \
    ((u64)(a) | (u64)(b) << 8 | (u64)(c) << 16 | (u64)(d) << 24 | (u64)(e) << 32 | (u64)(f) << 40 |      \
     (u64)(g) << 48 | (u64)(h) << 56)
#define BYTES(n) ((1ULL << (8 * (n))) - 1)
#define LOWER 0x2020202020202020ULL

/* Keeps the compiler from merging a bounds check with what is around it: the verifier has to see it. */
#define CHECKED(variable) asm volatile("" : "+r"(variable))
/* For a variable that was found to be 1 to limit, a power of two: leaves it as it is, and says so to verifiers
 * before Linux 6.8, which learn nothing from a comparison with zero. */
#define FROM_ONE_TO(limit, variable)                                                                     \
    do {                                                                                                 \
        CHECKED(variable);                                                                               \
        variable = ((variable - 1) & ((limit) - 1)) + 1;                                                 \
    } while (0)

static __always_inline void wake(struct link *link, u64 slot)
{
    u64 event = slot;

    if (!link->armed)
        return;
    link->armed = 0;
    if (port_events.ringbuf_output(&event, sizeof(event), 0))
        link->armed = 1;
}

/* --- heads --------------------------------------------------------------------------------------------- */

/* 1 when equal, 0 when not, without a branch: the verifier follows a limited number of them through a loop. */
static __always_inline u64 equal(u64 a, u64 b)
{
    u64 difference = a ^ b;
    u64 negative = -difference;

    CHECKED(negative);
    difference = ((difference | negative) >> 63) ^ 1;
    CHECKED(difference); /* or the compiler makes a branch of what it is multiplied with */
    return difference;
}

/* Brings the begin of the segment into `h` and notes where the lines are that decide about framing. */
static __always_inline int read_head(struct __sk_buff *skb, struct head *h)
{
    u64 length = skb->len;

    CHECKED(length);
    if (length > HEAD_MAX)
        length = HEAD_MAX;
    CHECKED(length);
    if (length < 16)
        return 0;
    CHECKED(length);
    if (length > HEAD_MAX)
        return 0;
    if (bpf_skb_load_bytes(skb, 0, h->data, length))
        return 0;
    *(u64 *)(h->data + length) = 0;
    h->length = length;
    h->end = h->line = h->odd = 0;
    h->lengths = h->length_at = h->transfers = h->transfer_at = h->connections = h->connection_at = 0;
    for (u64 i = 1; i < HEAD_MAX; i++) {
        u64 name, more, found;

        if (i >= h->length)
            break;
        if (h->data[i] != '\n')
            continue;
        name = *(u64 *)(h->data + i + 1);
        if ((name & BYTES(2)) == 0x0a0d) {
            h->end = i + 3;
            break;
        }
        h->line += i * equal(h->line, 0);
        /* A lone LF, and a folded line. */
        h->odd += 1 - equal(h->data[i - 1], '\r');
        h->odd += equal(name & 0xff, ' ') | equal(name & 0xff, '\t');
        name |= LOWER;
        more = *(u64 *)(h->data + i + 9) | LOWER;
        found = equal(name, WORD('c', 'o', 'n', 't', 'e', 'n', 't', '-')) &
                equal(more & BYTES(6), WORD('l', 'e', 'n', 'g', 't', 'h', 0, 0));
        h->lengths += found;
        h->length_at += found * (i + 15);
        found = equal(name, WORD('t', 'r', 'a', 'n', 's', 'f', 'e', 'r')) &
                equal(more & BYTES(4), WORD('-', 'e', 'n', 'c', 0, 0, 0, 0));
        h->transfers += found;
        h->transfer_at += found * (i + 9);
        found = equal(name, WORD('c', 'o', 'n', 'n', 'e', 'c', 't', 'i')) &
                equal(more & BYTES(2), WORD('o', 'n', 0, 0, 0, 0, 0, 0));
        h->connections += found;
        h->connection_at += found * (i + 11);
        h->odd += equal(name & BYTES(6), WORD('e', 'x', 'p', 'e', 'c', 't', 0, 0)) |
                  equal(name & BYTES(7), WORD('u', 'p', 'g', 'r', 'a', 'd', 'e', 0));
    }
    return h->end && !h->odd && h->lengths + h->transfers <= 1 && h->connections <= 1;
}

/* `: keep-alive`, and nothing else. */
static __always_inline int keeps_alive(struct head *h)
{
    u64 at = h->connection_at & (HEAD_MAX - 1);

    if (!h->connections)
        return 1;
    return (*(u64 *)(h->data + at) | LOWER) == WORD(':', ' ', 'k', 'e', 'e', 'p', '-', 'a') &&
           ((*(u64 *)(h->data + at + 8) & BYTES(5)) | (LOWER & BYTES(4))) ==
               WORD('l', 'i', 'v', 'e', '\r', 0, 0, 0);
}

/* `-encoding: chunked`, and nothing else. */
static __always_inline int is_chunked(struct head *h)
{
    u64 at = h->transfer_at & (HEAD_MAX - 1);

    return (*(u64 *)(h->data + at) | LOWER) == WORD('-', 'e', 'n', 'c', 'o', 'd', 'i', 'n') &&
           (*(u64 *)(h->data + at + 8) | LOWER) == WORD('g', ':', ' ', 'c', 'h', 'u', 'n', 'k') &&
           ((*(u64 *)(h->data + at + 16) & BYTES(3)) | (LOWER & BYTES(2))) ==
               WORD('e', 'd', '\r', 0, 0, 0, 0, 0);
}

/* The body that the head announces: phase and left. 0 when it cannot be told here. */
static __always_inline int announce(struct head *h, struct work *w)
{
    u64 at = h->length_at & (HEAD_MAX - 1);
    u64 digits = 0;

    w->at = h->end;
    w->phase = BOUNDARY;
    w->left = 0;
    if (h->transfers) {
        w->phase = CHUNK_SIZE;
        return is_chunked(h);
    }
    if (!h->lengths)
        return 1;
    if (h->data[at] != ':')
        return 0;
    at++;
    if (h->data[at] == ' ')
        at++;
    for (u64 i = 0; i < 12; i++) {
        u64 c = h->data[(at + i) & (HEAD_MAX - 1)];

        if (c == '\r')
            break;
        c -= '0';
        if (c > 9)
            return 0;
        w->left = w->left * 10 + c;
        digits++;
    }
    if (digits == 0 || digits > 11)
        return 0;
    if (w->left)
        w->phase = COUNTED;
    return 1;
}

static __always_inline int request_head(struct head *h, struct work *w)
{
    u64 method, line, get;

    line = h->line;
    CHECKED(line);
    if (line < 9 || line >= HEAD_MAX)
        return 0;
    CHECKED(line);
    if (*(u64 *)(h->data + ((line - 9) & (HEAD_MAX - 1))) != WORD('H', 'T', 'T', 'P', '/', '1', '.', '1'))
        return 0;
    method = *(u64 *)h->data;
    get = (method & BYTES(4)) == WORD('G', 'E', 'T', ' ', 0, 0, 0, 0);
    w->asked_head = (method & BYTES(5)) == WORD('H', 'E', 'A', 'D', ' ', 0, 0, 0);
    if (!get && !w->asked_head && (method & BYTES(5)) != WORD('P', 'O', 'S', 'T', ' ', 0, 0, 0) &&
        (method & BYTES(4)) != WORD('P', 'U', 'T', ' ', 0, 0, 0, 0) &&
        (method & BYTES(6)) != WORD('P', 'A', 'T', 'C', 'H', ' ', 0, 0) &&
        (method & BYTES(7)) != WORD('D', 'E', 'L', 'E', 'T', 'E', ' ', 0) &&
        method != WORD('O', 'P', 'T', 'I', 'O', 'N', 'S', ' '))
        return 0;
    w->replay = (get || w->asked_head) && w->phase == BOUNDARY ? h->end : 0;
    return 1;
}

static __always_inline int response_head(struct head *h, struct work *w, u64 asked_head)
{
    u64 status;

    if (*(u64 *)h->data != WORD('H', 'T', 'T', 'P', '/', '1', '.', '1'))
        return 0;
    status = *(u64 *)(h->data + 8) & BYTES(4);
    if (asked_head || status == WORD(' ', '2', '0', '4', 0, 0, 0, 0) ||
        status == WORD(' ', '3', '0', '4', 0, 0, 0, 0)) {
        w->phase = BOUNDARY;
        w->left = 0;
        return 1;
    }
    /* 1xx goes before the response proper; without a length the node's FIN ends it. Both are user space's. */
    return (status & BYTES(2)) != WORD(' ', '1', 0, 0, 0, 0, 0, 0) && h->lengths + h->transfers == 1;
}

/* --- bodies -------------------------------------------------------------------------------------------- */

/* Follows the body from w->at to the segment's end. 0 when something comes after the message, or is odd. */
static __always_inline int walk(struct __sk_buff *skb, struct work *w, u64 length)
{
    if (w->phase == BOUNDARY)
        return w->at == length;
    if (w->phase == COUNTED) {
        u64 rest = length - w->at;

        if (rest > w->left)
            return 0;
        w->left -= rest;
        if (!w->left)
            w->phase = BOUNDARY;
        return 1;
    }
    for (u64 step = 0; step < STEPS_MAX; step++) {
        u8 byte = 0;
        u64 c, phase = w->phase;

        if (w->at >= length)
            return 1;
        if (phase == CHUNK_DATA) {
            u64 rest = length - w->at;

            if (rest > w->left)
                rest = w->left;
            w->at += rest;
            w->left -= rest;
            if (!w->left)
                w->phase = DATA_CR;
            continue;
        }
        if (bpf_skb_load_bytes(skb, w->at, &byte, 1))
            return 0;
        c = byte;
        w->at++;
        if (phase == CHUNK_SIZE || phase == SIZE_MORE) {
            if (c == '\r') {
                if (phase == CHUNK_SIZE)
                    return 0;
                w->phase = SIZE_LF;
                continue;
            }
            if (c >= '0' && c <= '9')
                c -= '0';
            else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
                c = (c | 0x20) - 'a' + 10;
            else
                return 0;
            w->left = w->left * 16 + c;
            if (w->left > CHUNK_MAX)
                return 0;
            w->phase = SIZE_MORE;
        } else if (phase == SIZE_LF) {
            if (c != '\n')
                return 0;
            w->phase = w->left ? CHUNK_DATA : LAST_CR;
        } else if (phase == DATA_CR || phase == LAST_CR) {
            if (c != '\r')
                return 0;
            w->phase = phase + 1;
        } else {
            if (c != '\n')
                return 0;
            if (phase == LAST_LF) {
                w->phase = BOUNDARY;
                return w->at == length;
            }
            w->phase = CHUNK_SIZE;
        }
    }
    return 0;
}

/* --- where to ------------------------------------------------------------------------------------------ */

static __always_inline int is_flipped(struct side *backend)
{
    u64 key = backend->node;
    u64 *first_live_epoch = node.lookup(&key);

    return first_live_epoch && backend->epoch < *first_live_epoch;
}

static __always_inline int is_usable(struct side *backend)
{
    return backend->cookie && !backend->fin && !backend->dead && backend->acked == backend->passed &&
           !is_flipped(backend);
}

/* The side for the next request; 0 when user space has to find one. */
static __always_inline u64 choose(struct link *link, u64 first)
{
    first &= SIDES;
    if (is_usable(&link->side[first]))
        return first;
    first = (3 - first) & SIDES;
    return is_usable(&link->side[first]) ? first : 0;
}

static __always_inline int has_room(struct side *to, u64 length)
{
    return to->written + to->redirected + length - to->confirmed <= UNCONFIRMED_MAX &&
           to->segments - to->confirmed_segments < SEGMENTS_MAX;
}

static __always_inline int redirect(struct __sk_buff *skb, struct side *to)
{
    u64 key = to->cookie;
    u64 length = *(volatile u32 *)&skb->len;

    if (!key || !has_room(to, length))
        return 0;
    if (port_socks.sk_redirect_hash(skb, &key, 0) != SK_PASS)
        return 0;
    to->redirected += length;
    to->segments += 1;
    return 1;
}

/* Keeps a request that may be sent twice. */
static __always_inline void keep(struct __sk_buff *skb, struct link *link, u32 slot, u64 length)
{
    struct replay *replay = port_replays.lookup(&slot);

    link->replay = 0;
    CHECKED(length);
    if (!replay || length == 0 || length > HEAD_MAX)
        return;
    FROM_ONE_TO(HEAD_MAX, length);
    if (bpf_skb_load_bytes(skb, 0, replay->data, length) == 0)
        link->replay = length;
}

/* Where the segment goes, 0 when that is user space's to say. `w->begins`: a choice was made. */
static __always_inline u64 route(struct link *link, struct work *w)
{
    u64 pinned = link->pinned & SIDES;

    w->opaque = !link->http || link->request_phase == TUNNEL;
    w->begins = 0;
    w->at = 0;
    if (w->number != CLIENT) {
        if (w->number != pinned || (!w->opaque && link->requests == link->responses))
            return 0;
        w->phase = link->response_phase;
        w->left = link->response_left;
        return CLIENT;
    }
    w->phase = link->request_phase;
    w->left = link->request_left;
    if (!w->opaque && w->phase == BOUNDARY) {
        if (link->requests != link->responses || link->attention)
            return 0;
        w->begins = 1;
        return choose(link, link->first);
    }
    if (!link->http && (link->attention || !is_usable(&link->side[pinned])) &&
        bpf_ktime_get_ns() - link->last_ns >= link->idle_ns) {
        u64 other = (3 - pinned) & SIDES;

        if (is_usable(&link->side[other])) {
            w->begins = 1;
            return other;
        }
    }
    return link->side[pinned].fin || link->side[pinned].dead ? 0 : pinned;
}

/* Looks at an HTTP message's next segment. Whether it is understood, and leads nowhere beyond its message. */
static __always_inline int follow(struct __sk_buff *skb, struct link *link, struct work *w)
{
    if (w->phase == BOUNDARY) {
        u32 zero = 0;
        struct head *h = port_head.lookup(&zero);

        if (!h || !read_head(skb, h) || !keeps_alive(h) || !announce(h, w))
            return 0;
        if (!(w->number == CLIENT ? request_head(h, w) : response_head(h, w, link->asked_head)))
            return 0;
    }
    return walk(skb, w, *(volatile u32 *)&skb->len);
}

/* The segment is on its way: what that means for the connection. */
static __always_inline void advance(struct __sk_buff *skb, struct link *link, u64 slot, struct work *w)
{
    link->last_ns = bpf_ktime_get_ns();
    if (w->begins && link->pinned != w->target) {
        if (link->pinned)
            link->moved += 1;
        link->pinned = w->target;
        if (link->attention)
            wake(link, slot);
    }
    if (w->opaque)
        return;
    if (w->number == CLIENT) {
        if (w->begins) {
            keep(skb, link, slot, w->replay);
            link->asked_head = w->asked_head;
            link->requests += 1;
        }
        link->request_phase = w->phase;
        link->request_left = w->left;
        return;
    }
    link->replay = 0; /* a part of the response is out */
    link->response_phase = w->phase;
    link->response_left = w->left;
    if (w->phase == BOUNDARY) {
        link->responses += 1;
        if (link->attention)
            wake(link, slot);
    }
}

static __always_inline int carry(struct __sk_buff *skb, struct link *link, u64 slot, struct work *w)
{
    w->target = route(link, w);
    if (!w->target || (!w->opaque && !follow(skb, link, w)))
        return 0;
    if (!redirect(skb, &link->side[w->target & SIDES]))
        return 0;
    advance(skb, link, slot, w);
    return 1;
}

int steer_port(struct __sk_buff *skb)
{
    u64 cookie = bpf_get_socket_cookie(skb);
    u64 *found = port_ends.lookup(&cookie);
    u32 slot, zero = 0;
    u64 number;
    struct work *w = port_work.lookup(&zero);
    struct link *link;
    struct side *me;
    /* On kernels that pass the self-test: TCP sequence numbers of the first byte and of what follows the
     * last one. A FIN takes a number too. */
    u32 begin = skb->cb[0], end = skb->cb[1];

    if (!found || !w)
        return SK_PASS;
    slot = *found >> 2;
    number = *found & SIDES;
    link = port_links.lookup(&slot);
    if (!link)
        return SK_PASS;
    me = &link->side[number];

    if (me->positioned && begin != (u32)me->next_position)
        me->overlaps = 1;
    me->next_position = (u32)(begin + skb->len);
    me->positioned = 1;
    if (end - begin != skb->len || !skb->len)
        me->fin = 1;
    w->number = number;

    if (link->kernel && !me->fin && !me->overlaps && me->acked == me->passed &&
        carry(skb, link, slot, w))
        return SK_PASS;
    me->passed += *(volatile u32 *)&skb->len;
    wake(link, slot);
    return SK_PASS;
}

/* --- the gateway's cgroup ------------------------------------------------------------------------------ */

static __always_inline void watch(struct bpf_sock_ops *ops)
{
    bpf_sock_ops_cb_flags_set(ops, BPF_SOCK_OPS_STATE_CB_FLAG | BPF_SOCK_OPS_RTT_CB_FLAG);
}

int watch_port(struct bpf_sock_ops *ops)
{
    u32 op = ops->op, port = ops->local_port, slot;
    u64 cookie, number, *found;
    struct link *link;
    struct side *me;

    if (op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB) {
        if (port_numbers.lookup(&port))
            watch(ops);
        return 1;
    }
    if (op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB && op != BPF_SOCK_OPS_STATE_CB && op != BPF_SOCK_OPS_RTT_CB)
        return 1;
    cookie = bpf_get_socket_cookie(ops);
    found = port_ends.lookup(&cookie);
    if (!found)
        return 1;
    if (op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB) {
        watch(ops);
        return 1;
    }
    slot = *found >> 2;
    number = *found & SIDES;
    link = port_links.lookup(&slot);
    if (!link)
        return 1;
    me = &link->side[number];
    if (me->cookie != cookie)
        return 1;
    if (op == BPF_SOCK_OPS_STATE_CB) {
        u32 state = ops->args[1];

        if (state == BPF_TCP_CLOSE || (state == BPF_TCP_CLOSE_WAIT && number != CLIENT)) {
            me->dead = 1;
            wake(link, slot);
        }
        return 1;
    }
    me->confirmed = ops->bytes_acked - me->base;
    if (me->confirmed == me->written + me->redirected)
        me->confirmed_segments = me->segments;
    return 1;
}
