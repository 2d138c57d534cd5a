// The part of torch's stable C ABI (torch >= 2.10) that is used here, declared by hand.
//
// No torch header is included, so the build needs no torch, cannot pick the wrong one, and one library serves every
// version. tests/ops/test_abi.py compiles these declarations against torch's own.
#pragma once

#include <cstddef>
#include <cstdint>

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct StableListOpaque;
using StableListHandle = StableListOpaque*;
struct StringOpaque;
using StringHandle = StringOpaque*;
struct TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
using StableIValue = uint64_t;
using AOTITorchError = int32_t;
using ParallelFunc = void (*)(int64_t begin, int64_t end, void* context);

extern "C" {
[[nodiscard]] AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* k, const char* file,
                                                          uint32_t line, TorchLibraryHandle* ret_new_torch_lib);
[[nodiscard]] AOTITorchError torch_library_impl(TorchLibraryHandle self, const char* name,
                                                void (*fn)(StableIValue*, uint64_t, uint64_t),
                                                uint64_t extension_build_version);
[[nodiscard]] AOTITorchError torch_call_dispatcher(const char* opName, const char* overloadName, StableIValue* stack,
                                                   uint64_t extension_build_version);
[[nodiscard]] AOTITorchError torch_list_size(StableListHandle list_handle, size_t* size);
[[nodiscard]] AOTITorchError torch_list_get_item(StableListHandle list_handle, size_t index, StableIValue* element);
[[nodiscard]] AOTITorchError torch_delete_list(StableListHandle list_handle);
[[nodiscard]] AOTITorchError torch_string_c_str(StringHandle handle, const char** data);
[[nodiscard]] AOTITorchError torch_delete_string(StringHandle handle);
[[nodiscard]] AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
[[nodiscard]] AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* ret_numel);
[[nodiscard]] AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* ret_dim);
[[nodiscard]] AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** ret_sizes);
[[nodiscard]] AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** ret_strides);
[[nodiscard]] AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* ret_dtype);
[[nodiscard]] AOTITorchError aoti_torch_get_layout(AtenTensorHandle tensor, int32_t* ret_layout);
[[nodiscard]] AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* ret_device_type);
[[nodiscard]] AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* ret_device_index);
[[nodiscard]] AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* ret_is_contiguous);
[[nodiscard]] AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** ret_data_ptr);
[[nodiscard]] AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** ret_data_ptr);
[[nodiscard]] AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes_ptr,
                                                      const int64_t* strides_ptr, int32_t dtype, int32_t device_type,
                                                      int32_t device_index, AtenTensorHandle* ret_new_tensor);
[[nodiscard]] AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle self, int64_t ndim,
                                                            const int64_t* sizes_ptr, const int64_t* strides_ptr,
                                                            int64_t offset_increment, AtenTensorHandle* ret_new_tensor);
[[nodiscard]] AOTITorchError aoti_torch_create_tensor_from_blob(void* data, int64_t ndim, const int64_t* sizes_ptr,
                                                                const int64_t* strides_ptr, int64_t storage_offset,
                                                                int32_t dtype, int32_t device_type,
                                                                int32_t device_index, AtenTensorHandle* ret);
[[nodiscard]] AOTITorchError aoti_torch_cpu_addmm_out(AtenTensorHandle out, AtenTensorHandle self,
                                                      AtenTensorHandle mat1, AtenTensorHandle mat2, double beta,
                                                      double alpha);
[[nodiscard]] AOTITorchError aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle src, int32_t non_blocking);
[[nodiscard]] AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size, ParallelFunc func,
                                                void* ctx);
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_int16();
int32_t aoti_torch_dtype_int32();
size_t aoti_torch_dtype_element_size(int32_t dtype);
int32_t aoti_torch_layout_strided();
int32_t aoti_torch_device_type_cpu();
// Only a torch with CUDA has this one: a strong reference would keep the library from loading beside a CPU torch.
[[nodiscard]] __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                      void** ret_stream);
}
