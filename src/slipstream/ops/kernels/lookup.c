/* Prompt lookup: where did the last tokens of a sequence stand before, and what followed them there? See lookup.py. */
#include "shared.h"

enum { PLACES = 16, LONGEST = 32 }; /* as in lookup.py: places that are compared, and tokens of each */

/* Which chain the `gram` tokens belong to that end with *last (FNV-1a over tokens, folded). */
static int64_t chain_of(const int32_t *last, int64_t gram, int64_t chains) {
    uint64_t hash = 0xCBF29CE484222325u;
    for (int64_t i = 1 - gram; i <= 0; i++) hash = (hash ^ (uint32_t)last[i]) * 0x100000001B3u;
    return (int64_t)((hash ^ (hash >> 32)) & (uint64_t)(chains - 1));
}

/* tokens [slots, length] of which known[slot] are known and limit[slot] can be; heads [slots, chains] and before [slots, length] hold
 * places + 1 (0: none). `most` guesses, at most, are written behind what is known; found[i]: length of the match, 0: there is none. */
void lookup(int32_t *tokens, const int32_t *known, const int32_t *limit, int32_t *heads, int32_t *before, int32_t *indexed, int64_t length,
            int64_t chains, int64_t gram, const int64_t *slots, int64_t count, int64_t most, int32_t *found) {
    for (int64_t i = 0; i < count; i++) {
        int64_t slot = slots[i], last = known[slot] - 1, place = indexed[slot], best = gram - 1, from = 0;
        int32_t *row = tokens + slot * length, *head = heads + slot * chains, *next = before + slot * length;
        for (place = place < gram - 1 ? gram - 1 : place; place < last; place++) {
            int64_t chain = chain_of(row + place, gram, chains);
            next[place] = head[chain], head[chain] = (int32_t)place + 1;
        }
        indexed[slot] = (int32_t)place;
        found[i] = 0;
        if (last < gram) continue;
        int64_t at = head[chain_of(row + last, gram, chains)];
        for (int64_t tried = 0; at > 0 && tried < PLACES && best < LONGEST; tried++, at = next[at - 1]) {
            int64_t same = 0, furthest = least(LONGEST, at);
            while (same < furthest && row[at - 1 - same] == row[last - same]) same++;
            if (same > best) best = same, from = at;
        }
        if (best < gram) continue;
        for (int64_t j = 0; j < least(most, limit[slot] - last - 1); j++) row[last + 1 + j] = row[from + j]; /* may overlap: it repeats */
        found[i] = (int32_t)best;
    }
}
