/*
 * Forwards the plain part of a node's answer to its client without waking the gateway.
 *
 * One program, attached as SK_SKB_VERDICT without a stream parser: it sees every segment of a node's
 * socket once, whole and in order, under that socket's lock. For each it says one of two things:
 *
 *   redirect   the segment goes out of the client's socket, after a copy of it went into the flow's ring
 *   pass       the segment is left for user space to read, judge and write on
 *
 * Everything that decides more than that is user space's. Invariants:
 *
 *   order      A segment is redirected only while user space has written on all that was passed
 *              (acked == passed). User space in turn writes only when TCP has taken all that was redirected.
 *   journal    The ring is written and `redirected` grows before the segment is forwarded.
 *   room       Unread ring bytes never exceed RING_BYTES and unread segments never SEGMENTS_MAX, and user
 *              space marks them read only while the client keeps up: that bounds the kernel's backlog.
 *   plain      Only whole HTTP chunks that hold one unfinished token event each are redirected. All else
 *              is passed: the end of an answer, an error, a cut chunk, anything that is not understood.
 *   FIN        A segment that carries one is passed. Redirecting the empty segment of a bare FIN would
 *              break the client's socket for good.
 *
 * A doubt is always resolved by SK_PASS, never by SK_DROP: dropped bytes are acknowledged and gone.
 *
 * RING_BYTES, SEGMENT_MAX, SEGMENTS_MAX, CHUNKS_MAX, WAKE_BYTES and WAKE_SEGMENTS come from layout.py,
 * where the same structs are declared again; both sides check the sizes.
 */
#include <uapi/linux/bpf.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the byte patterns below are written for little-endian machines"
#endif

/* One leg of one answer. The first 16 words are user space's, the last 8 the kernel's: no line is shared. */
struct flow {
    u64 client;            /* cookie of the client's socket, key of `clients` */
    u64 splice;            /* 1: plain segments may be redirected; 0: everything is passed */
    u64 acked;             /* of `passed`: bytes that are wholly with the client's TCP */
    u64 consumed;          /* of `redirected`: bytes that user space has copied out of the ring */
    u64 consumed_segments; /* the same in segments */
    u64 armed;             /* user space sleeps: set there, cleared here when it is woken */
    u64 already_read;      /* body bytes that user space had before the socket came here */
    u64 generation;        /* which use of this slot it is; 0: free */
    u64 node;              /* key in `node` */
    u64 epoch;             /* incarnation of the node */
    u64 unused[6];

    u64 passed;            /* bytes left to user space */
    u64 redirected;        /* bytes journalled and sent on to the client */
    u64 segments;          /* as many segments they were */
    u64 last_ns;           /* CLOCK_MONOTONIC of the newest one */
    u64 next_position;     /* TCP sequence number that has to come next */
    u64 positioned;        /* `next_position` is known */
    u64 overlaps;          /* segments that did not begin there: the stream cannot be trusted any more */
    u64 fin;               /* the node has closed */
};
_Static_assert(sizeof(struct flow) == 192, "layout.py declares 24 words");

/* The slack is never written: it lets the verifier see that offset + length stays inside. */
struct ring {
    u8 data[RING_BYTES];
    u8 slack[SEGMENT_MAX];
};
_Static_assert(sizeof(struct ring) == RING_BYTES + SEGMENT_MAX, "layout.py reads rings at this stride");

/* A segment, looked at before it is redirected. */
struct scratch {
    u8 data[SEGMENT_MAX];
    u8 slack[64];    /* patterns are read past the end; what they find there is never counted */
    /* In memory while they are worked with: the verifier would follow each value of a register. */
    volatile u32 length;
    volatile u32 at;         /* where in the segment the look at the framing is */
    volatile u32 size;       /* of the chunk there */
    volatile u32 reasons;    /* members called finish_reason */
    volatile u32 unfinished; /* those of them that are null */
    volatile u32 events;     /* blank lines: ends of events */
    volatile u32 errors;     /* members called error */
    volatile u32 chunks;
};

/* Nodes' sockets, by cookie. The program hangs on this map, so a socket in it is under its verdict. */
BPF_SOCKHASH(nodes, u64, FLOWS);
/* Clients' sockets, by cookie: targets only. No program hangs here, so what a client sends is read as ever. */
BPF_SOCKHASH(clients, u64, CLIENTS);
/* Cookie of a node's socket -> slot in `flows` and `rings`. */
BPF_TABLE("hash", u64, u32, conn, FLOWS);
/* State of the flows; mapped into the gateway's memory and, after its death, into its successor's. */
BPF_F_TABLE("array", u32, struct flow, flows, FLOWS, BPF_F_MMAPABLE);
/* The journal: the newest RING_BYTES that were redirected, at their position modulo RING_BYTES. */
BPF_F_TABLE("array", u32, struct ring, rings, FLOWS, BPF_F_MMAPABLE);
/* Digest of a node's name -> its first epoch that is not flipped away. A flip is one write here, whatever the
 * number of flows, from any process. */
BPF_TABLE("hash", u64, u64, node, NODES);
/* Slots whose user space should wake up, at most one entry per sleeper. */
BPF_RINGBUF_OUTPUT(events, 1);
/* Space of the running CPU: a segment does not fit on a BPF stack. */
BPF_PERCPU_ARRAY(scratch, struct scratch, 1);

/* Eight bytes of text as they stand in memory. */
#define WORD(a, b, c, d, e, f, g, h)                                                                     \
    ((u64)(a) | (u64)(b) << 8 | (u64)(c) << 16 | (u64)(d) << 24 | (u64)(e) << 32 | (u64)(f) << 40 |      \
     (u64)(g) << 48 | (u64)(h) << 56)
#define BYTES(n) ((1ULL << (8 * (n))) - 1)

/* Keeps the compiler from merging a bounds check with what is around it: the verifier has to see it. For
 * 64-bit variables: around 32-bit ones the compiler makes copies, and then the wrong one is bounded. */
#define CHECKED(variable) asm volatile("" : "+r"(variable))
/* For a variable that was found to be 1 to limit, a power of two: leaves it as it is, and says so to verifiers
 * before Linux 6.8, which learn nothing from a comparison with zero. */
#define FROM_ONE_TO(limit, variable)                                                                     \
    do {                                                                                                 \
        CHECKED(variable);                                                                               \
        variable = ((variable - 1) & ((limit) - 1)) + 1;                                                 \
    } while (0)

static __always_inline void wake(struct flow *flow, u32 slot)
{
    u64 event = slot;

    if (!flow->armed)
        return;
    flow->armed = 0;
    if (events.ringbuf_output(&event, sizeof(event), 0))
        flow->armed = 1;
}

/* 1 when equal, 0 when not, without a branch: the verifier follows a limited number of them through a loop. */
static __always_inline u64 equal(u64 a, u64 b)
{
    u64 difference = a ^ b;
    u64 negative = -difference;

    CHECKED(negative);
    return ((difference | negative) >> 63) ^ 1;
}

/* Counts in the segment what tells a token event from the rest. */
static __always_inline void scan(struct scratch *s, u64 length)
{
    u64 events = 0, errors = 0;

    s->reasons = s->unfinished = 0;
    /* Old verifiers see the end of a loop in `less`, never in `not equal`, to which the compiler would turn this. */
    CHECKED(length);
    for (u64 i = 0; i < SEGMENT_MAX; i++) {
        CHECKED(i);
        if (i >= length || i >= SEGMENT_MAX)
            break;
        u64 word = *(u64 *)(s->data + i);

        events += equal(word & BYTES(2), 0x0a0a);
        /* Inside a JSON string a quote has a backslash before it, so this is never a model's word. */
        errors += equal(word & BYTES(7), WORD('"', 'e', 'r', 'r', 'o', 'r', '"', 0));
        if (word == WORD('f', 'i', 'n', 'i', 's', 'h', '_', 'r')) {
            u64 after = *(u64 *)(s->data + i + 8);
            u64 spaced = equal(after, WORD('e', 'a', 's', 'o', 'n', '"', ':', ' '));

            s->reasons++;
            s->unfinished += equal(after, WORD('e', 'a', 's', 'o', 'n', '"', ':', 'n'));
            s->unfinished += spaced & equal(s->data[i + 16], 'n');
        }
    }
    s->events = events;
    s->errors = errors;
}

#define INVALID (1 << 20) /* more than any chunk of a segment */

/* The value of a hexadecimal digit, INVALID added when it is none. */
static __always_inline u64 hexadecimal(u64 c)
{
    u64 value, shown;

    c &= 0xff;
    value = (c & 15) + 9 * (c >> 6 & 1);
    shown = value + '0' + ('a' - '0' - 10) * ((9 - value) >> 63);
    return value + INVALID * (1 - (equal(c | 0x20, shown) & equal(equal(c >> 5, 0), 0)));
}

/* Whether the segment is `size CRLF data: {"...}LF LF CRLF`, once or several times, and nothing else. */
static __always_inline int is_whole_chunks(struct scratch *s)
{
    s->at = 0;
    for (u64 chunk = 1; chunk <= CHUNKS_MAX; chunk++) {
        u64 at = s->at & (SEGMENT_MAX - 1);
        u64 word = *(u64 *)(s->data + at);
        u64 size = hexadecimal(word);

        at++;
        for (u64 digit = 2; digit <= 3; digit++) {
            word >>= 8;
            if ((word & 0xff) == '\r')
                break;
            size = size * 16 + hexadecimal(word);
            at++;
        }
        s->size = size;
        s->at = at;
        at = s->at & (SEGMENT_MAX - 1);
        if ((*(u64 *)(s->data + at) & BYTES(2)) != 0x0a0d ||
            *(u64 *)(s->data + at + 2) != WORD('d', 'a', 't', 'a', ':', ' ', '{', '"'))
            return 0;
        s->at = at + 2 + s->size; /* at the CRLF that ends the chunk */
        at = s->at;
        if (s->size < 12 || at + 2 > s->length)
            return 0;
        at = (at - 3) & (SEGMENT_MAX - 1);
        if ((*(u64 *)(s->data + at) & BYTES(5)) != WORD('}', '\n', '\n', '\r', '\n', 0, 0, 0))
            return 0;
        s->at = at + 5;
        if (s->at == s->length) {
            s->chunks = chunk;
            return 1;
        }
    }
    return 0;
}

/* A copy of the segment at its place in the ring. */
static __always_inline int journal(struct __sk_buff *skb, struct ring *ring, u64 position, u64 length)
{
    u64 offset = position & (RING_BYTES - 1);
    u64 first = RING_BYTES - offset;
    u64 rest;

    if (first > length)
        first = length;
    rest = length - first;
    CHECKED(first);
    if (first > SEGMENT_MAX)
        return 0;
    CHECKED(first);
    if (first == 0)
        return 0;
    FROM_ONE_TO(SEGMENT_MAX, first);
    if (bpf_skb_load_bytes(skb, 0, ring->data + offset, first))
        return 0;
    CHECKED(rest);
    if (rest > SEGMENT_MAX)
        return 0;
    CHECKED(rest);
    if (rest == 0)
        return 1;
    FROM_ONE_TO(SEGMENT_MAX, rest);
    return bpf_skb_load_bytes(skb, first, ring->data, rest) == 0;
}

/* The answers of a node that was flipped away go through user space, where they can be moved at a token. */
static __always_inline int is_flipped(struct flow *flow)
{
    u64 key = flow->node;
    u64 *first_live_epoch = node.lookup(&key);

    return first_live_epoch && flow->epoch < *first_live_epoch;
}

static __always_inline int has_room(struct flow *flow, u64 length)
{
    return flow->redirected + length - flow->consumed <= RING_BYTES &&
           flow->segments - flow->consumed_segments < SEGMENTS_MAX;
}

/* Whether every chunk of the segment is one token event of an answer that goes on. */
static __always_inline int is_plain(struct __sk_buff *skb, struct scratch *s, u64 length)
{
    CHECKED(length);
    if (length > SEGMENT_MAX)
        return 0;
    CHECKED(length);
    if (length == 0)
        return 0;
    FROM_ONE_TO(SEGMENT_MAX, length);
    if (bpf_skb_load_bytes(skb, 0, s->data, length))
        return 0;
    *(u64 *)(s->data + length) = 0; /* or the scan would read on into an older segment */
    s->length = length;
    scan(s, length);
    if (!is_whole_chunks(s))
        return 0;
    return s->events == s->chunks && s->reasons >= s->chunks && s->reasons == s->unfinished && !s->errors;
}

int steer(struct __sk_buff *skb)
{
    u64 cookie = bpf_get_socket_cookie(skb);
    u32 *found = conn.lookup(&cookie);
    u32 slot, zero = 0;
    struct scratch *s = scratch.lookup(&zero);
    struct flow *flow;
    struct ring *ring;
    /* On kernels that pass the self-test: TCP sequence numbers of the first byte and of what follows the
     * last one. A FIN takes a number too. */
    u32 begin = skb->cb[0], end = skb->cb[1];

    if (!found || !s)
        return SK_PASS;
    slot = *found;
    flow = flows.lookup(&slot);
    ring = rings.lookup(&slot);
    if (!flow || !ring)
        return SK_PASS;

    if (flow->positioned && begin != flow->next_position)
        flow->overlaps++;
    flow->next_position = begin + skb->len;
    flow->positioned = 1;
    if (end - begin != skb->len)
        flow->fin = 1;

    if (flow->splice && flow->acked == flow->passed && !flow->overlaps && !flow->fin &&
        !is_flipped(flow) && has_room(flow, skb->len) && is_plain(skb, s, skb->len) &&
        journal(skb, ring, flow->redirected, s->length)) {
        u64 client = flow->client;

        if (clients.sk_redirect_hash(skb, &client, 0) == SK_PASS) {
            flow->redirected += s->length;
            flow->segments += 1;
            flow->last_ns = bpf_ktime_get_ns();
            if (!has_room(flow, RING_BYTES - WAKE_BYTES) ||
                flow->segments - flow->consumed_segments >= WAKE_SEGMENTS)
                wake(flow, slot);
            return SK_PASS;
        }
    }
    /* Read again: a length that was compared with each step of the scan would make each a case of its own. */
    flow->passed += *(volatile u32 *)&skb->len;
    wake(flow, slot);
    return SK_PASS;
}
