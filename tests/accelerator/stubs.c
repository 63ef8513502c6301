/* The CUDA runtime and driver of a machine with one device that does nothing, for torch to start on.
   .ci/accelerator builds it, and adds all functions that are not here, as `succeed`. Every function
   returns 0, success; arguments that do not matter are left out. */
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>

typedef void *Pointer;

int succeed(void) { return 0; }
static int number(int *out, int value) { return *out = value, 0; }
static int handle(Pointer *out) {
  static long next = 4096;
  return *out = (Pointer)(next += 16), 0;
}
static int memory(Pointer *out, size_t bytes) { return *out = malloc(bytes), 0; }

int cudaGetDeviceCount(int *count) { return number(count, 1); }
int cudaGetDevice(int *device) { return number(device, 0); }
int cudaDriverGetVersion(int *version) { return number(version, 13000); }
int cudaRuntimeGetVersion(int *version) { return number(version, 13000); }
int cudaDeviceCanAccessPeer(int *can) { return number(can, 0); }
int cudaDeviceGetStreamPriorityRange(int *least, int *most) { return number(least, 0) + number(most, -3); }
int cudaStreamIsCapturing(Pointer stream, int *status) { return number(status, 0); }
int cudaStreamGetCaptureInfo(Pointer stream, int *status) { return number(status, 0); }
int cudaStreamCreateWithPriority(Pointer *stream) { return handle(stream); }
int cudaEventCreateWithFlags(Pointer *event) { return handle(event); }
int cudaMalloc(Pointer *out, size_t bytes) { return memory(out, bytes); }
int cudaHostAlloc(Pointer *out, size_t bytes) { return memory(out, bytes); }
int cudaMemGetInfo(size_t *left, size_t *all) { return *left = *all = 80ul << 30, 0; }
int cudaGetDeviceProperties(struct cudaDeviceProp *p) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->major = 9, p->multiProcessorCount = 132, p->totalGlobalMem = 80ul << 30, p->warpSize = 32;
  p->maxThreadsPerMultiProcessor = 2048, p->maxThreadsPerBlock = 1024, p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448;
  return 0;
}
int cudaDeviceGetAttribute(int *value, int attribute) {
  return number(value, attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrMultiProcessorCount ? 132 : 0);
}

int cuDriverGetVersion(int *version) { return number(version, 13000); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return number(active, 1); }
int cuCtxGetCurrent(Pointer *context) { return handle(context); }
int cuGetErrorString(int error, const char **text) { return *text = "there is no device", 0; }
