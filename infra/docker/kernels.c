/* What kernels need of numba's runtime, for `kernels.py`: memory, and one form of an array as another one.
 *
 * A kernel has a little memory of its own: a block of numbers, or some. numba describes it by a record with the number of its
 * holders, what ends it, its address and its size; kernels read the address, and count. Arrays are reshaped only where their
 * elements lie side by side, so the strides follow from the lengths.
 *
 * The names and the record are numba's (numba/core/runtime/nrt.h). `kernels.py` tries the library before anybody uses it. */

#include <stdint.h>
#include <stdlib.h>

struct memory {
    size_t holders;
    void (*end)(void *data, size_t size, void *told);
    void *told;
    void *data;
    size_t size;
    void *allocator;
};

struct memory *NRT_MemInfo_alloc_aligned(size_t size, unsigned align) {
    size_t record = align < 64 ? 64 : align; /* a power of two, as align is, so the data behind it are aligned, too */
    void *place = NULL;
    if (posix_memalign(&place, record, record + size) != 0)
        return NULL;
    struct memory *made = place;
    *made = (struct memory){.holders = 1, .data = (char *)place + record, .size = size};
    return made;
}

struct memory *NRT_MemInfo_alloc(size_t size) { return NRT_MemInfo_alloc_aligned(size, 64); }

void NRT_MemInfo_call_dtor(struct memory *gone) { free(gone); }

void *NRT_Allocate(size_t size) { return malloc(size); }

void NRT_Free(void *gone) { free(gone); }

int numba_attempt_nocopy_reshape(intptr_t old_axes, const intptr_t *old_lengths, const intptr_t *old_strides, intptr_t axes,
                                 const intptr_t *lengths, intptr_t *strides, intptr_t item_bytes, int by_columns) {
    intptr_t old_count = 1, count = 1, step = item_bytes;
    for (intptr_t axis = 0; axis < old_axes; axis++)
        old_count *= old_lengths[axis];
    for (intptr_t axis = 0; axis < axes; axis++)
        count *= lengths[axis];
    if (count != old_count || by_columns)
        return 0;
    for (intptr_t axis = old_axes - 1; count != 0 && axis >= 0; axis--) {
        if (old_lengths[axis] != 1 && old_strides[axis] != step)
            return 0;
        step *= old_lengths[axis];
    }
    step = item_bytes;
    for (intptr_t axis = axes - 1; axis >= 0; axis--) {
        strides[axis] = step;
        step *= lengths[axis];
    }
    return 1;
}
