/* Large pages for what every step reads: with pages of 4 KiB, the processor fetches ahead only to the end of each, and looks up
 * addresses for a third of the time. */
#include <stdint.h>

#ifdef __linux__
#include <sys/mman.h>
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

/* Asks for them: for pages to come, and for those that are there already. A system without them refuses, which changes nothing. */
void large_pages(char *from, int64_t bytes) {
    const uintptr_t page = 2 << 20;
    uintptr_t first = ((uintptr_t)from + page - 1) / page * page, last = ((uintptr_t)from + (uintptr_t)bytes) / page * page;
    if (first >= last) return;
    madvise((void *)first, last - first, MADV_HUGEPAGE);
    madvise((void *)first, last - first, MADV_COLLAPSE);
}
#else
void large_pages(char *from, int64_t bytes) { (void)from, (void)bytes; }
#endif
