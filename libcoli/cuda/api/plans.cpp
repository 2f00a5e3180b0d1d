/* api/plans.cpp - plans in words, limits of plans, ceilings of memory: entry points of coli_cuda.h. */
#include <cstdio>

#include "../dispatch.h"
#include "../kernels/probe.h"

using namespace coli;

namespace {

int describe(const PrefillProduct &plan, const char *name, int experts, char *text, size_t capacity) {
    return snprintf(
        text, capacity,
        "%-6s prefill on %s%s, %d expert(s), tiles of %d tokens, %d items in %d blocks of %d warps, %d stages, %d bytes "
        "shared",
        name, plan.wgmma ? "wgmma" : "mma", plan.exact ? ", exact" : "", experts, plan.token_tile, plan.items, plan.blocks,
        plan.warps, plan.stages, plan.shared_bytes);
}

/* A text that goes on counting when its memory is full. */
class Text {
  public:
    Text(char *text, size_t capacity) : text_(text), capacity_(text ? capacity : 0) {}
    template <class... Arguments> void add_line(Arguments... arguments) {
        length_ += describe(arguments..., end(), left());
        length_ += snprintf(end(), left(), "\n");
    }
    size_t length() const { return length_; }

  private:
    char *end() const { return length_ < capacity_ ? text_ + length_ : nullptr; }
    size_t left() const { return length_ < capacity_ ? capacity_ - length_ : 0; }

    char *text_;
    size_t capacity_, length_ = 0;
};

bool find_gpu(int device, int capability, GpuTraits *gpu) {
    if (capability != 0) {
        COLI_REFUSE_IF(!typical_gpu(capability, gpu), COLI_E_ARGUMENT,
                       "capability %d, expected 75, 80, 86, 89, 90, 100 or 120, or 0 for a device's own", capability);
        return true;
    }
    return device_visible(device) && succeeded(read_traits(device, gpu), "asking device %d what it can do", device);
}

MatrixView view_of(int format) {
    const int group_size = format == COLI_INT4_GROUPED ? 64 : 0;
    MatrixView view{};
    view.kind = tile_kind(format, group_size, fp8_table_is_e4m3() || !fp8_table_published(), codebook_is_small());
    view.group_size = group_size;
    view.tile_bytes = static_cast<int>(tile_bytes(format, group_size));
    return view;
}

bool fill_params(const int *formats, int D, int H, int experts, int rows, GroupParams *params) {
    COLI_REFUSE_IF(!formats, COLI_E_ARGUMENT, "formats is NULL");
    for (int i = 0; i < 3; i++) {
        COLI_REFUSE_IF(coli_geometry_row_bytes(formats[i], 1) == 0 || formats[i] == COLI_INT3_G64, COLI_E_FORMAT,
                       "format %d is none that GPUs compute with", formats[i]);
    }
    COLI_REFUSE_IF(D < 1 || H < 1 || experts < 1 || rows < 1, COLI_E_SHAPE,
                   "%d expert(s) with gate [%d, %d] and %d row(s), expected 1 or more of all", experts, H, D, rows);
    COLI_REFUSE_IF(experts > COLI_CUDA_MAX_EXPERTS, COLI_E_ARGUMENT, "%d experts, expected 1 to %d", experts,
                   COLI_CUDA_MAX_EXPERTS);
    params->D = D, params->H = H;
    params->count = experts;
    params->max_rows = rows;
    for (int e = 0; e < experts; e++) {
        params->experts[e] = {view_of(formats[0]),  view_of(formats[1]), view_of(formats[2]), e * rows, rows,
                              formats[2] == COLI_E8};
    }
    return true;
}

} // namespace

size_t coli_cuda_plan_text(int device, int capability, const int *formats, int D, int H, int experts, int rows, char *text,
                           size_t capacity) {
    GpuTraits gpu{};
    GroupParams params{};
    COLI_FORWARD(find_gpu(device, capability, &gpu) && fill_params(formats, D, H, experts, rows, &params));
    const GroupParts parts = split_group(gpu, nullptr, params);
    Text lines(text, capacity);
    if (parts.many.count) {
        lines.add_line(parts.of_many.hidden, "hidden", experts);
        lines.add_line(parts.of_many.down, "down", experts);
    } else if (parts.some.count) {
        lines.add_line(parts.of_some.hidden, "hidden", experts);
        lines.add_line(parts.of_some.down, "down", experts);
    } else {
        lines.add_line(parts.of_few.hidden, "hidden", experts);
        if (parts.of_few.rotation.rows > 0) lines.add_line(parts.of_few.rotation, experts);
        lines.add_line(parts.of_few.down, "down", experts);
    }
    return lines.length();
}

int coli_cuda_limit_path(const char *path) {
    COLI_REFUSE_IF(!path, COLI_E_ARGUMENT, "the path is NULL");
    Path most;
    COLI_REFUSE_IF(!path_named(path, &most), COLI_E_ARGUMENT, "path \"%s\", expected plain, ampere or hopper", path);
    limit_path(most);
    return 1;
}

void coli_cuda_require_exact(int exact) {
    require_exact(exact != 0);
}

int coli_cuda_probe_dev(int device, int kind, const void *a_dev, void *b_dev, size_t bytes, void *stream) {
    Context *context = find_context(device);
    if (!context) return 0;
    COLI_REFUSE_IF(kind != 0 && kind != 1, COLI_E_ARGUMENT, "a probe of kind %d, expected 0 (read) or 1 (copy)", kind);
    COLI_REFUSE_IF(!a_dev || (kind == 1 && !b_dev), COLI_E_ARGUMENT, "%s is NULL", a_dev ? "b_dev" : "a_dev");
    COLI_REFUSE_IF(reinterpret_cast<uintptr_t>(a_dev) % 16 || reinterpret_cast<uintptr_t>(b_dev) % 16 || bytes % 16,
                   COLI_E_ARGUMENT, "%zu bytes at %p and %p, expected all multiples of 16", bytes, a_dev, b_dev);
    if (bytes == 0) return 1;
    DeviceCall call(*context);
    COLI_FORWARD(call.ok());
    return succeeded(launch_probe(a_dev, kind == 1 ? b_dev : nullptr, bytes, context->gpu.multiprocessors,
                                  context->gpu.capability >= 90, static_cast<cudaStream_t>(stream)),
                     "launching a probe of %zu bytes on device %d", bytes, device);
}
