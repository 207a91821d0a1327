/* An NVTX client: what a profiler loads into a process through NVTX_INJECTION64_PATH. It writes a line for each push
   and pop of a domain to the file named by NVTX_LOG: B|E, domain, name, category, payload, thread, nanoseconds. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>
#include <nvtx3/nvToolsExt.h>

#define MAX_NAMES 256

typedef struct { char *name; char *categories[MAX_NAMES]; } Domain;

static FILE *log_file;

static void write_event(char kind, Domain *domain, const char *name, const char *category, long long payload) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    fprintf(log_file, "%c\t%s\t%s\t%s\t%lld\t%ld\t%lld\n", kind, domain ? domain->name : "-", name, category, payload,
            (long)syscall(SYS_gettid), now.tv_sec * 1000000000LL + now.tv_nsec);
    fflush(log_file);
}

static nvtxDomainHandle_t NVTX_API create_domain(const char *name) {
    Domain *domain = calloc(1, sizeof(Domain));
    domain->name = strdup(name);
    return (nvtxDomainHandle_t)domain;
}

static void NVTX_API name_category(nvtxDomainHandle_t handle, uint32_t category, const char *name) {
    if (category < MAX_NAMES) ((Domain *)handle)->categories[category] = strdup(name);
}

static nvtxStringHandle_t NVTX_API register_string(nvtxDomainHandle_t handle, const char *text) {
    (void)handle;
    return (nvtxStringHandle_t)strdup(text);
}

static int NVTX_API push(nvtxDomainHandle_t handle, const nvtxEventAttributes_t *attributes) {
    Domain *domain = (Domain *)handle;
    const char *name = attributes->messageType == NVTX_MESSAGE_TYPE_REGISTERED
                           ? (const char *)attributes->message.registered : attributes->message.ascii;
    const char *category = domain && attributes->category < MAX_NAMES ? domain->categories[attributes->category] : NULL;
    int has_payload = attributes->payloadType == NVTX_PAYLOAD_TYPE_INT64;
    write_event('B', domain, name ? name : "-", category ? category : "-", has_payload ? attributes->payload.llValue : -1);
    return 0;
}

static int NVTX_API pop(nvtxDomainHandle_t handle) {
    write_event('E', (Domain *)handle, "-", "-", -1);
    return 0;
}

__attribute__((visibility("default"))) int NVTX_API InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
    const NvtxExportTableCallbacks *callbacks = get_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table = NULL;
    unsigned int size = 0;
    log_file = fopen(getenv("NVTX_LOG"), "a");
    if (!log_file || !callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create_domain;
    *table[NVTX_CBID_CORE2_DomainNameCategoryA] = (NvtxFunctionPointer)name_category;
    *table[NVTX_CBID_CORE2_DomainRegisterStringA] = (NvtxFunctionPointer)register_string;
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
    return 1;
}
