// An accelerator made of host memory: torch's PrivateUse1 backend, whose operations are the CPU's on the same bytes.
//
// It is as strict as a GPU is: operands on two devices are errors, tables of autocast are CUDA's, float64 can be absent.
// What a host would wait for (a copy to it, a number asked of it, a copy from memory that is not pinned) is counted by
// the line of Python that asked.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

using namespace at;

namespace {

constexpr size_t kHeader = 64;

std::atomic<int64_t> held{0}, most{0}, waits{0};
std::mutex guarded;
std::map<std::string, int64_t> waited_at;
std::unordered_map<const void*, size_t> pinned;
int devices = 2;
bool wide = false;
thread_local int current = 0;
thread_local int inside = 0;

struct Inside {
  Inside() { inside++; }
  ~Inside() { inside--; }
};

struct On {
  int before = current;
  explicit On(std::optional<Device> device) {
    if (device && device->index() >= 0) current = device->index();
  }
  ~On() { current = before; }
};

struct NoAutograd {
  c10::impl::ExcludeDispatchKeyGuard keys{c10::autograd_dispatch_keyset};
};

// The innermost line of Python outside torch, and the innermost of this project.
std::string where() {
  if (!Py_IsInitialized()) return "?";
  std::string own, inner;
  auto state = PyGILState_Ensure();
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* name = PyUnicode_AsUTF8(code->co_filename);
    std::string file(name ? name : "?");
    std::string line = file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    bool installed = file.find("site-packages") != std::string::npos;
    if (inner.empty() && file.find("/torch/") == std::string::npos) inner = line;
    bool ours = !installed && (file.find("/models/") != std::string::npos || file.find("/tasks/") != std::string::npos);
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
    if (ours) {
      own = line;
      Py_XDECREF(frame);
      break;
    }
  }
  PyGILState_Release(state);
  if (own.empty()) return inner.empty() ? "engine" : inner;
  return inner == own ? own : own + " < " + inner;
}

void waited(const std::string& why) {
  if (inside) return;
  waits++;
  auto line = why + " @ " + where();
  std::lock_guard<std::mutex> lock(guarded);
  waited_at[line]++;
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(guarded);
  return pinned.count(data) > 0;
}

void release(void* data) {
  held -= static_cast<int64_t>(static_cast<size_t*>(data)[-2]);
  free(static_cast<char*>(data) - kHeader);
}

void* take(size_t bytes) {
  void* raw = nullptr;
  if (posix_memalign(&raw, kHeader, bytes + kHeader)) throw std::bad_alloc();
  char* data = static_cast<char*>(raw) + kHeader;
  reinterpret_cast<size_t*>(data)[-2] = bytes;
  int64_t now = (held += static_cast<int64_t>(bytes)), peak = most;
  while (now > peak && !most.compare_exchange_weak(peak, now)) {
  }
  return data;
}

struct Allocating final : c10::DeviceAllocator {
  DataPtr allocate(size_t bytes) override {
    void* data = take(bytes ? bytes : 1);
    return {data, data, &release, Device(kPrivateUse1, current)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = held;
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = most;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { most = held.load(); }
};
Allocating allocating;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocating);

void unpin(void* data) {
  {
    std::lock_guard<std::mutex> lock(guarded);
    pinned.erase(data);
  }
  free(data);
}

struct Pinning final : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (posix_memalign(&data, kHeader, bytes ? bytes : 1)) throw std::bad_alloc();
    std::lock_guard<std::mutex> lock(guarded);
    pinned[data] = bytes;
    return {data, data, &unpin, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
Pinning pinning;

using Clock = std::chrono::steady_clock;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(DeviceType) {}
  DeviceType type() const override { return kPrivateUse1; }
  Device exchangeDevice(Device device) const override {
    Device before(kPrivateUse1, current);
    if (device.index() >= 0) current = device.index();
    return before;
  }
  Device getDevice() const override { return Device(kPrivateUse1, current); }
  void setDevice(Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  // An event is the moment it was recorded at: all that went before is done.
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  double elapsedTime(void* first, void* last, const DeviceIndex) const override {
    auto span = *static_cast<Clock::time_point*>(last) - *static_cast<Clock::time_point*>(first);
    return std::chrono::duration<double, std::milli>(span).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeEvent(void*) const override { waited("synchronize"); }
  void synchronizeStream(const Stream&) const override { waited("synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { waited("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto before = current;
    current = index;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index >= 0 ? exchangeDevice(index) : current;
  }
  Allocator* getPinnedMemoryAllocator() const override { return &pinning; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static Generator generator = at::detail::createCPUGenerator(0);
    return generator;
  }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(0); }
  Device getDeviceFromPtr(void*) const override { return Device(kPrivateUse1, current); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    DataPtr data = allocating.allocate(bytes);
    memcpy(data.get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};
Hooks hooks;
struct Registering {
  Registering() { RegisterPrivateUse1HooksInterface(&hooks); }
} registering;

void check_dtype(std::optional<ScalarType> dtype) {
  TORCH_CHECK(wide || dtype != kDouble, "this device has no float64");
}

const c10::DispatchKeySet kKeys(DispatchKey::PrivateUse1);

Tensor empty_plain(c10::SymIntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
                   std::optional<Device> device, std::optional<bool>, std::optional<MemoryFormat> format) {
  check_dtype(dtype);
  On on(device);
  return at::detail::empty_generic_symint(size, &allocating, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided_plain(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                           std::optional<Layout>, std::optional<Device> device, std::optional<bool>) {
  check_dtype(dtype);
  On on(device);
  return at::detail::empty_strided_generic(size, stride, &allocating, kKeys, c10::dtype_or_default(dtype));
}

// The same bytes as a tensor of the CPU.
Tensor bytes_of(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(kCPU);
  if (!tensor.numel()) return at::empty(tensor.sizes(), options);
  auto* data = static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.itemsize();
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

Tensor to_device(const Tensor& tensor, Device device) {
  if (!tensor.defined()) return tensor;
  auto made = at::empty_like(tensor, tensor.options().device(device));
  bytes_of(made).copy_(tensor);
  return made;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.is_cpu() && to.is_privateuseone() && from.numel()) {
    if (!(non_blocking && is_pinned(from.storage().data()))) waited("copy from memory that is not pinned");
  } else if (from.is_privateuseone() && to.is_cpu()) {
    waited("copy to the host");
  }
  at::NoGradGuard no_grad;
  NoAutograd plain;
  auto target = bytes_of(to);
  target.copy_(bytes_of(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Scalar sim_item(const Tensor& tensor) {
  waited("number asked for");
  NoAutograd plain;
  return bytes_of(tensor).item();
}

Tensor sim_as_strided(const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl_meta_symint(tensor, size, stride, offset);
}

Tensor reshape_alias(const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return sim_as_strided(tensor, size, stride, std::nullopt);
}

const Tensor& sim_resize(const Tensor& tensor, c10::SymIntArrayRef size, std::optional<MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_storage(Tensor& tensor, Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  return at::native::set_storage_meta__symint(tensor, storage, offset, size, stride);
}

Tensor sim_conj(const Tensor& tensor) {
  NoAutograd plain;
  auto made = at::empty(tensor.sizes(), tensor.options());
  bytes_of(made).copy_(bytes_of(tensor).conj_physical());
  return made;
}

bool waits_for_shape(const std::string& name) {
  static const std::set<std::string> names = {"aten::nonzero",   "aten::masked_select",     "aten::unique_dim",
                                              "aten::_unique2",  "aten::repeat_interleave", "aten::equal",
                                              "aten::is_nonzero"};
  return names.count(name) > 0;
}

// The tensors of an operand: one, or those of a list.
std::vector<Tensor> tensors_of(const c10::IValue& value) {
  std::vector<Tensor> found;
  if (value.isTensor()) {
    found.push_back(value.toTensor());
  } else if (value.isList()) {
    for (auto& each : value.toListRef()) {
      if (each.isTensor()) found.push_back(each.toTensor());
    }
  }
  return found;
}

bool written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Whether an operation can work on the bytes as they are: what it writes has its size, and is nothing it reads too.
bool in_place(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  auto& arguments = op.schema().arguments();
  size_t first = stack.size() - arguments.size();
  for (size_t place = 0; place < arguments.size(); place++) {
    auto& value = stack[first + place];
    if (value.isDevice()) return false;
    if (!written(arguments[place])) continue;
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().numel()) return false;
    auto target = value.toTensor();
    for (size_t other = 0; other < arguments.size(); other++) {
      if (other == place) continue;
      for (auto& each : tensors_of(stack[first + other])) {
        if (each.defined() && each.is_alias_of(target)) return false;
      }
    }
  }
  return true;
}

c10::IValue on_host(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(bytes_of(value.toTensor())) : value;
  if (value.isTensorList()) {
    std::vector<Tensor> found;
    for (auto& each : value.toTensorVector()) found.push_back(each.defined() ? bytes_of(each) : each);
    return c10::IValue(c10::List<Tensor>(found));
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> found;
    for (const std::optional<Tensor>& each : value.toOptionalTensorList()) {
      found.push_back(each && each->defined() ? std::optional<Tensor>(bytes_of(*each)) : each);
    }
    return c10::IValue(found);
  }
  return value;
}

c10::IValue on_device(const c10::IValue& value, Device device) {
  if (value.isTensor()) return c10::IValue(to_device(value.toTensor(), device));
  if (!value.isTensorList()) return value;
  std::vector<Tensor> found;
  for (auto& each : value.toTensorVector()) found.push_back(to_device(each, device));
  return c10::IValue(c10::List<Tensor>(found));
}

// The CPU's operation on the same bytes, none of them copied but those of what it makes.
void on_same_bytes(const c10::OperatorHandle& op, torch::jit::Stack* stack, Device device) {
  NoAutograd plain;
  auto &arguments = op.schema().arguments(), &returns = op.schema().returns();
  size_t first = stack->size() - arguments.size();
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  for (size_t place = 0; place < arguments.size(); place++) (*stack)[first + place] = on_host(given[place]);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  first = stack->size() - returns.size();
  for (size_t place = 0; place < returns.size(); place++) {
    auto& made = (*stack)[first + place];
    const auto* alias = returns[place].alias_info();
    bool same = false;
    for (size_t other = 0; alias && alias->isWrite() && !same && other < arguments.size(); other++) {
      same = written(arguments[other]) && *arguments[other].alias_info() == *alias;
      if (same) made = given[other];
    }
    if (!same) made = on_device(made, device);
  }
}

// All other operations: those of the CPU, if all operands are on one device.
void carry_out(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto name = op.schema().operator_name().name;
  size_t count = op.schema().arguments().size(), first = stack->size() - count;
  bool indexes = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
  if (waits_for_shape(name)) waited(name);
  bool here = false, on_cpu = false;
  int index = -1;
  auto see = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_privateuseone()) {
      check_dtype(tensor.scalar_type());
      bool other = index >= 0 && index != tensor.device().index() && tensor.dim() > 0;
      TORCH_CHECK(!other, "Expected all tensors to be on the same device, but found two in ", name);
      here = true;
      index = tensor.device().index();
    } else if (tensor.is_cpu() && tensor.dim() > 0) {
      on_cpu = true;
    }
  };
  for (size_t place = 0; place < count; place++) {
    auto& value = (*stack)[first + place];
    if (indexes && place == 1) {
      if (!value.isList()) continue;
      for (auto& each : value.toListRef()) {
        if (!each.isTensor() || !each.toTensor().defined()) continue;
        auto type = each.toTensor().scalar_type();
        if (each.toTensor().is_cpu()) waited("index by a tensor of the host");
        if (type == kBool || type == kByte) waited(name + " by a mask");
      }
    } else if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (auto& tensor : value.toTensorVector()) see(tensor);
    }
  }
  TORCH_CHECK(!(here && on_cpu), "Expected all tensors to be on the same device, but one is on the CPU in ", name);
  Inside mark;
  if (here && in_place(op, *stack)) {
    on_same_bytes(op, stack, Device(kPrivateUse1, index));
  } else {
    at::native::cpu_fallback(op, stack);
  }
}

Tensor sim_convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                   bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  NoAutograd plain;
  bool has_bias = bias && bias->defined();
  TORCH_CHECK(input.is_privateuseone() && weight.is_privateuseone() && (!has_bias || bias->is_privateuseone()),
              "Expected all tensors to be on the same device, but one is on the CPU in convolution");
  std::optional<Tensor> added;
  if (has_bias) added = bytes_of(*bias);
  return to_device(at::convolution_symint(bytes_of(input), bytes_of(weight), added, stride, padding, dilation,
                                          transposed, output_padding, groups),
                   input.device());
}

std::tuple<Tensor, Tensor, Tensor> sim_convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  NoAutograd plain;
  auto outputs = weight.sym_size(transposed ? 1 : 0) * (transposed ? groups : c10::SymInt(1));
  std::vector<c10::SymInt> bias{outputs};
  auto [a, b, c] = at::convolution_backward_symint(
      bytes_of(gradient).contiguous(), bytes_of(input), bytes_of(weight), at::OptionalSymIntArrayRef(bias), stride,
      padding, dilation, transposed, output_padding, groups, mask);
  return {to_device(a, input.device()), to_device(b, input.device()), to_device(c, input.device())};
}

// Attention that holds no scores, as CUDA's, where the CPU's own can do it.
int64_t attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                  double dropout, bool causal, std::optional<double> scale, bool grouped) {
  if (mask && mask->requires_grad()) return static_cast<int64_t>(sdp::SDPBackend::math);
  NoAutograd plain;
  std::optional<Tensor> added;
  if (mask) added = bytes_of(*mask);
  auto chosen = at::_fused_sdp_choice(bytes_of(query), bytes_of(key), bytes_of(value), added, dropout, causal, scale,
                                      grouped);
  bool fused = chosen == static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  return static_cast<int64_t>(fused ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math);
}

void check_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask) {
  for (auto& each : {query, key, value, mask}) {
    TORCH_CHECK(!each.defined() || each.device() == query.device(),
                "Expected all tensors to be on the same device, but found two in attention");
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> sim_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool causal, bool, std::optional<double> scale) {
  NoAutograd plain;
  check_attention(query, key, value, mask ? *mask : Tensor());
  std::optional<Tensor> added;
  if (mask && mask->defined()) added = bytes_of(*mask);
  auto [made, sums] = at::_scaled_dot_product_flash_attention_for_cpu(bytes_of(query), bytes_of(key), bytes_of(value),
                                                                      dropout, causal, added, scale);
  auto device = query.device();
  return {to_device(made, device), to_device(sums, device), {}, {}, query.size(2), key.size(2), {}, {}, {}};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sim_attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
    std::array<bool, 4>, const Tensor& made, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
    double dropout, bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  NoAutograd plain;
  std::optional<Tensor> added;
  if (mask.defined()) added = bytes_of(mask);
  auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      bytes_of(gradient), bytes_of(query), bytes_of(key), bytes_of(value), bytes_of(made), bytes_of(sums), dropout,
      causal, added, scale);
  auto device = query.device();
  return {to_device(a, device), to_device(b, device), to_device(c, device), {}};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&carry_out>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_plain);
  m.impl("empty_strided", &empty_strided_plain);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &sim_item);
  m.impl("as_strided", &sim_as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &sim_resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("view", &at::native::view);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("alias", &at::native::alias);
  m.impl("_conj", &sim_conj);
  // CUDA has these whole, where devices that have none are given several operations for each.
  for (const char* name : {"native_group_norm", "native_layer_norm", "silu_backward", "mish_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&carry_out>());
  }
  m.impl("convolution_overrideable", &sim_convolution);
  m.impl("convolution_backward_overrideable", &sim_convolution_backward);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &sim_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &sim_attention_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// CUDA's tables.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SINGLE_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(SINGLE)
  AT_FORALL_FP32_SET_OPT_DTYPE(SINGLE_RESULT)
  AT_FORALL_PROMOTE(WIDEST)
}

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("waits", [] {
    std::lock_guard<std::mutex> lock(guarded);
    return waited_at;
  });
  m.def("forget", [] {
    std::lock_guard<std::mutex> lock(guarded);
    waits = 0;
    waited_at.clear();
  });
  m.def("have", [](int count, bool doubles) {
    devices = count;
    wide = doubles;
  });
  m.def("count", [] { return devices; });
  m.def("current", [] { return current; });
  m.def("choose", [](int index) { current = index; });
}
