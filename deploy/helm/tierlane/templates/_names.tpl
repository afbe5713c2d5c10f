{{/* What several templates write: labels, the image of a role, its environment, and how its pods are locked down. */}}
{{- define "tierlane.labels" -}}
app.kubernetes.io/name: tierlane
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}
{{- define "tierlane.image" -}}
image: {{ .repository }}:{{ .root.Values.images.tag | default .root.Chart.AppVersion }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
{{- end }}
{{- define "tierlane.secret" -}}
- name: {{ .variable }}
  valueFrom: {secretKeyRef: {name: {{ .root.Values.existingSecret }}, key: {{ .key }}{{ if .optional }}, optional: true{{ end }}}}
{{- end }}
{{- define "tierlane.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}
{{- define "tierlane.gracePeriod" -}}
{{- $notice := index .Values.settings "TIERLANE_NOTICE_MS" | default 10000 | int }}
{{- $drain := index .Values.settings "TIERLANE_DRAIN_MS" | default 600000 | int }}
{{- add 30 (div (add $notice $drain) 1000) }}
{{- end }}
{{- define "tierlane.tlsVolume" -}}
{{- if .Values.tls.secret }}
- name: tls
  secret: {secretName: {{ .Values.tls.secret }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- define "tierlane.tlsMount" -}}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /etc/tls, readOnly: true}
{{- end }}
{{- end }}
{{- define "tierlane.locked" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}
